"""Compares the loss implementations that are installed: time, memory and error in one row.

``python -m loss_bench --help`` shows the commands. The modules, in the order in which a run uses them:

- ``cases``: what is measured; names of passes, shapes and presets, and the bytes that a pass has to move.
- ``inputs``: the tensors of a case, random or read from a file.
- ``calls``: how a backend is called, as its own users call it.
- ``check``: the float64 reference and the verdict; a wrong result is not timed.
- ``measure``: clocks, host time, peak memory, ceilings.
- ``runner``: one case on every backend; ``worker``: the same in a process that may be lost; ``session``: all cases.
- ``results``: the rows and their JSON form.
- ``report``, ``tables``: the rows as tables for people; ``plots``, ``page``: as pictures and as one HTML page.
- ``processes``: tasks in processes of their own, for what follows.
- ``compiling``: kernels compiled ahead; ``accuracy``: errors over hard inputs; ``train``: a small language model
  trained with each backend.
- ``cli``: the commands; ``choices``: what their words choose; ``terminal``: what they print and how they end.
- ``peers``: other people's libraries behind the registry's door, one a file.
"""

from loss_bench.__about__ import __version__

__all__ = ["__version__"]
