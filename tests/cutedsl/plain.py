"""What the DSL's compiler translates, as the Python that it was."""

import types


def plain(decorated):
    """The function under a decorator of the DSL. The DSL gives the function itself other code once it is compiled."""
    function = decorated.__wrapped__
    code = getattr(function, "_original_code", function.__code__)
    made = types.FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made
