"""The laboratory: networks in namespaces, benchmarks, simulation, demo. A training job loads none of it."""
