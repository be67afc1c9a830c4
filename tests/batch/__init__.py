"""Batches: from lines to records."""
