"""Mutation run (``make mutants``): breaks the engine in one small place at a time and looks whether a test notices."""
