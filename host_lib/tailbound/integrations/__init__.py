"""Callbacks for the trainers that people use; each module needs its trainer."""
