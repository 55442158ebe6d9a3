"""``python -m haloconv COMMAND``: what the package has to say at a command line."""

import argparse
import sys

from . import _info

COMMANDS = {"info": _info}


def main(arguments=None):
    parser = argparse.ArgumentParser(
        prog="python -m haloconv", description="What haloconv has at a command line."
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, module in COMMANDS.items():
        about = module.__doc__.partition("\n")[0]
        module.add_arguments(commands.add_parser(name, help=about, description=about))
    chosen = parser.parse_args(arguments)
    return COMMANDS[chosen.command].main(chosen)


if __name__ == "__main__":
    sys.exit(main())
