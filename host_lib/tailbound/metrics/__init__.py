"""A rank's status as named metrics with units and labels; ``metrics.host`` serves them to Prometheus."""
