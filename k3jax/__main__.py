"""``python -m k3jax``, the same as the ``k3jax`` command."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
