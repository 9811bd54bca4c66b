"""Entry point of ``ssdtrain-fx`` and ``python -m ssdtrain_fx``: checks that the packages it needs are installed."""

from __future__ import annotations

import importlib.util
import sys

NEEDED = ("typer", "rich", "matplotlib", "transformers")


def main() -> None:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(
            f"ssdtrain-fx: {', '.join(missing)} not installed. The command needs the extra 'demo': "
            "pip install 'ssdtrain-fx[demo]'"
        )
    from ssdtrain_fx.cli import app

    app(prog_name="ssdtrain-fx")


if __name__ == "__main__":
    main()
