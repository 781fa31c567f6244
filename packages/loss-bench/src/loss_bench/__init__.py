"""Compares the loss implementations that are installed: time, memory and error in one row.

``python -m loss_bench --help`` shows the commands. The modules, in the order in which a run uses them:

- ``cases``: what is measured; names of passes, shapes and presets, and the bytes that a pass has to move.
- ``inputs``: the tensors of a case, random or read from a file.
- ``calls``: how a backend is called, as its own users call it.
- ``check``: the float64 reference and the verdict; a wrong result is not timed.
- ``measure``: clocks, host time, peak memory, ceilings.
- ``runner``: the loop over cases, backends and passes.
- ``results``: the rows and their JSON form.
- ``report``: the rows as tables for people.
- ``train``: a small language model trained with each backend.
- ``peers``: other people's libraries behind the registry's door, one a file.
"""

from loss_bench.__about__ import __version__

__all__ = ["__version__"]
