"""The engine's own core in a simulated network and in virtual time: ``tailbound simulate`` and the tests of the engine.

``fabric`` has clock and links, ``machine`` what a rank has of its machine, ``engine`` is the real one, ``world`` has
the ranks of a job. For the command ``ports`` has switches, ``layouts`` who is in which jobs, ``steps`` what they do.
What must hold after every turn is checked by the tests, which build on these (``tests/sim/engine.py``).
"""
