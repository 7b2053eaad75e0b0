"""A dataclass is the command line: each field an option, with its default, its type and a help line.

    @dataclass
    class Args:
        lr: float = option(1e-6, "peak learning rate (ours)")

    args = parse(Args, __doc__)        # --lr 3e-6; an unknown option is an error
"""
import argparse
import contextlib
import os
import sys
import typing
from dataclasses import field, fields


def option(default, help, choices=None):
    return field(default=default, metadata={"help": help, "choices": choices})


def positional(help):
    """A file or folder named without an option; one or more where the field is a list. Such fields stand first in a class."""
    return field(metadata={"help": help, "positional": True})


def parse(cls, description, argv=None, defaults=None):
    """argv (None: the command line) -> cls. bool fields become --name / --no-name; the name's _ becomes -.

    defaults: {field: value} in the place of the class's own.
    """
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, cls)
    parser.set_defaults(**defaults or {})
    with open(os.devnull, "w") as nowhere:      # under torchrun, rank 0 says it
        with contextlib.redirect_stderr(sys.stderr if os.environ.get("RANK", "0") == "0" else nowhere):
            return cls(**vars(parser.parse_args(argv)))


def add_options(parser, cls):
    types = typing.get_type_hints(cls)
    for f in fields(cls):
        if "positional" in f.metadata:
            parser.add_argument(f.name, nargs="+" if types[f.name] == list[str] else None, help=f.metadata["help"])
            continue
        kind = next(t for t in (typing.get_args(types[f.name]) or (types[f.name],)) if t is not type(None))
        shown = str(f.default).removeprefix(os.getcwd() + os.sep)       # the built-in samples, from here
        text = f.metadata["help"] + ("" if shown in ("None", "", "False") else f" [{shown}]")
        name = "--" + f.name.replace("_", "-")
        if kind is bool:
            parser.add_argument(name, action=argparse.BooleanOptionalAction, default=f.default, help=text)
        else:
            parser.add_argument(name, type=kind, default=f.default, choices=f.metadata["choices"], help=text,
                                metavar=None if f.metadata["choices"] else {int: "N", float: "X", str: "S"}[kind])


def check(ok, message):
    """One sentence for the user where a value is not allowed."""
    if not ok:
        raise ValueError(message)


@contextlib.contextmanager
def about(what):
    """A ValueError raised inside begins with what it is about: a record, an option."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None


def run_script(main):
    """Run main(); bad input ends in one sentence and exit status 2, Ctrl-C in one line and 130.

    ESCRAG_TRACEBACK=1 shows where it was raised.
    """
    try:
        main()
    except KeyboardInterrupt:
        print("\nstopped; what was saved is complete (a trainer goes on with --resume, the others with the same command and --out)",
              file=sys.stderr)
        sys.exit(130)
    except (ValueError, OSError) as error:
        if os.environ.get("ESCRAG_TRACEBACK"):
            raise
        print(f"{os.path.basename(sys.argv[0])}: error: {error}", file=sys.stderr)
        sys.exit(2)
