"""Other people's libraries behind the registry's door, in the ready-made form of ``loss_core.backend``.

One library a module. Beside what the contract asks for, a module here states

``PEER: str``
    The distribution that it wraps. The benchmark calls the module's functions directly, without loss-core around
    them, and shows this distribution and its version.
``INPLACE: bool``
    Whether its cross-entropy gives the gradient the logits' memory in any case (optional, default False).

An option that the library lacks raises ``UnsupportedInput``; nothing is emulated and nothing is ignored.
"""
