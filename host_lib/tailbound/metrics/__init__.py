"""A rank's status as named metrics with units and labels, for Prometheus (``metrics.host``) and TensorBoard."""
