"""Command-line arguments of the smaller commands: argparse whose complaint is a ConfigError."""

import argparse
from typing import NoReturn

from thinwire.errors import ConfigError

__all__ = ["Arguments"]


class Arguments(argparse.ArgumentParser):
    """Raise ConfigError where argparse would print its usage and exit."""

    def error(self, message: str) -> NoReturn:
        """Raise with argparse's one line."""
        raise ConfigError(f"{message} (see `{self.prog} --help`)")
