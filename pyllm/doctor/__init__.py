"""What is wrong with a machine, as far as pyllm is concerned: `pyllm doctor`.

`host` looks at Python, packages, memory, disks and the CPU; `gpu` at drivers, CuPy and every GPU, and tries on it what
the engine relies on. Each check is a function that returns findings; one that raises becomes a finding, too.
"""
