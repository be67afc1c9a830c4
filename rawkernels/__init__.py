"""Kernel sources (.cu) and their headers. Data only: `pyllm.device` finds, compiles and launches them."""
