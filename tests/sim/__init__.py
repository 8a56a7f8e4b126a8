"""A discrete-event simulation of whole jobs that runs the transport's decisions unchanged."""
