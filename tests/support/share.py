"""A share of the tests, spread over all of them: ``pytest -p support.share --share 3/60`` is the third of every sixty.

For tools that slow tests down a hundredfold, such as compute-sanitizer.
"""


def pytest_addoption(parser):
    parser.addoption("--share", metavar="I/N", help="only the I-th of every N tests")


def pytest_collection_modifyitems(config, items):
    share = config.getoption("--share")
    if share:
        index, of = map(int, share.split("/"))
        left = [item for at, item in enumerate(items) if at % of != index - 1]
        config.hook.pytest_deselected(items=left)
        items[:] = items[index - 1 :: of]
