"""``python -m loss_bench``."""

from loss_bench.cli import main

if __name__ == "__main__":
    main()
