"""Configuration: a tree of dataclasses <- a TOML preset <- the command line. Unknown keys and bad values are errors."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import os
import sys
import time
import tomllib
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import tyro

Config = TypeVar("Config")


class ConfigError(ValueError):
    """A configuration value breaks a rule. The message names the value, the rule and the remedy."""


def load_config(
    cls: type[Config],
    argv: Sequence[str] | None = None,
    *,
    presets: Path,
    prog: str,
    default: str,
    description: str = "",
) -> Config:
    """The configuration a command was started with, checked.

    cls: dataclass, possibly nested; a class in the tree may have `validate(self)` that raises ConfigError.
    argv: arguments without the program's name; None reads sys.argv.
    presets: folder of `<name>.toml` files; `--config NAME` or `--config FILE.toml` picks one, else `default`.

    Ends the process with status 2 and one message (from rank 0) where a key is unknown or a value is bad. That happens
    before any process group exists, so no rank is left waiting.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    with _refusing(prog):
        chooser = argparse.ArgumentParser(prog=prog, add_help=False, allow_abbrev=False)
        chooser.add_argument("--config", default=default)
        chosen, overrides = chooser.parse_known_args(argv)
        names = ", ".join(sorted(path.stem for path in presets.glob("*.toml")))
        about = (
            f"{description}\n\n--config NAME|FILE.toml picks the values that the options below change; "
            f"presets: {names} (default: {default})."
        )
        preset = _find(chosen.config, presets, names)
        arguments = _arguments(cls, _read(preset, cls))
        try:
            config = _parse(cls, arguments + overrides, prog, about.strip())
        except ConfigError as error:
            with contextlib.suppress(SystemExit):
                _parse(cls, overrides, prog, about.strip())  # raises where the command line alone is to blame
            raise ConfigError(f"{preset}: {error}") from None
        validate(config)
    return config


def validate(config: Any) -> None:
    """Calls `validate()` of every dataclass in the tree, innermost first. Raises what they raise: ConfigError."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            validate(value)
    if hasattr(config, "validate"):
        config.validate()


def check(condition: bool, message: str) -> None:
    """Raises ConfigError(message) unless `condition`."""
    if not condition:
        raise ConfigError(message)


def to_dict(config: Any) -> dict[str, Any]:
    """The tree as nested dicts of JSON values (paths become strings, tuples lists)."""

    def plain(value: Any) -> Any:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
        if isinstance(value, Path):
            return str(value)
        if isinstance(value, (list, tuple)):
            return [plain(item) for item in value]
        return value

    return plain(config)


def _find(name: str, presets: Path, names: str) -> Path:
    path = Path(name) if name.endswith(".toml") else presets / f"{name}.toml"
    check(path.is_file(), f"config {name!r} is neither a preset nor a file; presets: {names}; a file ends in .toml")
    return path


def _read(path: Path, cls: type[Any]) -> dict[str, Any]:
    """The tables of a TOML file; every key is a field of the dataclass tree."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    _check_keys(tables, cls, path, "")
    return tables


def _check_keys(table: dict[str, Any], cls: type[Any], path: Path, prefix: str) -> None:
    hints = typing.get_type_hints(cls)
    known = [field.name for field in dataclasses.fields(cls)]
    for key, value in table.items():
        check(key in known, f"{path}: unknown key {prefix}{key}; known here: {', '.join(known)}")
        if dataclasses.is_dataclass(hints[key]):
            check(
                isinstance(value, dict),
                f"{path}: {prefix}{key}={value!r} is a value; it must be a table [{prefix}{key}]",
            )
            _check_keys(value, typing.cast(type, hints[key]), path, f"{prefix}{key}.")
        else:
            check(not isinstance(value, dict), f"{path}: {prefix}{key} is a table; it must be a value")
            items = value if isinstance(value, list) else []
            check(
                not any(str(item).startswith("--") for item in items),
                f"{path}: {prefix}{key}={value!r} holds an item that begins with --, which would be read as an option",
            )


def _arguments(cls: type[Any], table: dict[str, Any], prefix: str = "") -> list[str]:
    """The tables as command-line arguments, so that one parser judges values wherever they come from."""
    arguments: list[str] = []
    for key, value in table.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            arguments += _arguments(cls, value, f"{name}.")
        elif isinstance(value, list):
            arguments += [f"--{name}", *map(str, value)]
        else:
            # `=` keeps a value that begins with a minus sign from being read as an option.
            arguments.append(f"--{name}={value}")
    return arguments


def _parse(cls: type[Config], arguments: list[str], prog: str, description: str) -> Config:
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(
                cls,
                prog=prog,
                args=arguments,
                description=description,
                config=(tyro.conf.FlagConversionOff,),
            )
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        raise ConfigError(complaint.getvalue().strip() or "the command line could not be read") from None


@contextlib.contextmanager
def _refusing(prog: str) -> Iterator[None]:
    """Turns a ConfigError into one message and exit status 2."""
    try:
        yield
    except ConfigError as error:
        refuse(prog, error)


def refuse(prog: str, error: Exception) -> typing.NoReturn:
    """Prints what is wrong, once on each node, and ends the process with status 2."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"{prog}: {error}", file=sys.stderr, flush=True)
    else:
        # The launcher ends the job when its first rank ends; the one that speaks is to have spoken by then.
        time.sleep(2.0)
    raise SystemExit(2)
