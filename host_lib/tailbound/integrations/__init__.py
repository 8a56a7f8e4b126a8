"""Callbacks for the trainers that people use; each module needs its trainer.

from tailbound.integrations.transformers import TailboundCallback  # Trainer(..., callbacks=[TailboundCallback()])
"""
