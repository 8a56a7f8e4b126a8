"""``stats()`` as named metrics with units and labels, for Prometheus (``metrics.prometheus``) and TensorBoard.

Nothing here needs PyTorch, and ``metrics.flatten`` nothing but the standard library.
"""
