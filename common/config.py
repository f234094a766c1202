"""Settings: one frozen dataclass per program; flags, environment variables and help come from its fields.

A field is a bool, int, float or str, declared with `setting(default, help)`. `from_args` reads, in rising priority:
the default, `MINI_INFER_<FIELD>`, the flag `--field-name`. A bool gets `--flag` and `--no-flag`. Nothing here knows
what any setting means; a settings class checks its own values in `__post_init__` with ConfigError.

A wing declares its settings in its own dataclass, in `settings.py` of its folder. `with_wings` adds those fields to
the program's class if the wing is installed.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar, NoReturn, TypeVar

from common.errors import ConfigError
from common.wings import from_wing, wing_modules

T = TypeVar("T")
Rules = Mapping[tuple[str, ...], str]  # names of settings -> the reason of a refusal
NO_RULES: Rules = types.MappingProxyType({})
ENV_PREFIX = "MINI_INFER_"


class SettingsParser(argparse.ArgumentParser):
    """A parser that reports a mistake in one line: the usage text of eighty flags would hide it."""

    instead: Mapping[str, str] = types.MappingProxyType({})  # flag of another program -> what to use instead

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.unrecognized(unknown)
        return parsed

    def unrecognized(self, arguments: Sequence[str]) -> NoReturn:
        """End the program with an error that, with the wing of hints, names the flag that was meant."""
        meant_by = from_wing("common.hints.flags:meant_by")
        meant = meant_by(arguments[0], self._option_string_actions, self.instead) if meant_by else ""
        self.error(f"unrecognized arguments: {' '.join(arguments)}{meant}")

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (--help lists all flags)\n")


def setting(
    default: Any,
    help: str,
    *,
    choices: Sequence[str] = (),
    flags: Sequence[str] = (),
    off: Sequence[Any] = (),
    excludes: Rules = NO_RULES,
    needs: Rules = NO_RULES,
    per_worker: bool = False,
    many: bool = False,
) -> Any:
    """Return a dataclass field with its help text. flags: more names on the command line.

    off: values besides the default that leave the setting off. excludes: settings that it cannot be combined with.
    needs: settings of which it needs at least one (`check_together`). per_worker: a file that each worker of a
    cluster writes. many: the flag may be followed by several values, which are joined by spaces.
    """
    metadata = {
        "help": help, "choices": tuple(choices), "flags": tuple(flags),
        "off": (default, *off), "excludes": excludes, "needs": needs, "per_worker": per_worker,
        "many": many,
    }  # fmt: skip
    return dataclasses.field(default=default, metadata=metadata)


class Settings:
    """Base of a program's settings class, which wings extend."""

    wings: ClassVar[tuple[type[Any], ...]] = ()
    """The settings classes of the installed wings."""

    def of(self, wing: type[T]) -> T:
        """Return the settings of one wing. Raises ConfigError for values that cannot work."""
        return wing(**{field.name: getattr(self, field.name) for field in dataclasses.fields(wing)})  # type: ignore[arg-type]

    def check_together(self) -> None:
        """Check all wings' settings. Raises ConfigError for one that another excludes or that lacks another."""
        for wing in self.wings:
            self.of(wing)
        fields = {field.name: field.metadata for field in dataclasses.fields(self)}  # type: ignore[arg-type]
        on = [name for name, rules in fields.items() if getattr(self, name) not in rules["off"]]
        for kind, is_wrong in (("excludes", True), ("needs", False)):
            for names, reason in (rule for name in on for rule in fields[name][kind].items()):
                if any(name in on for name in names) is is_wrong:
                    raise ConfigError(reason)


S = TypeVar("S", bound=Settings)


def with_wings(package: str, module: str = "settings") -> Callable[[type[S]], type[S]]:
    """Add to a settings class the fields of wings: of the dataclass in `module` of each folder of the package.

    Type checkers do not see these fields, so that only the wing itself reads them, by `Settings.of`.
    """

    def extend(cls: type[S]) -> type[S]:
        modules = wing_modules(package, module)
        members = [(each.__name__, value) for each in modules for value in vars(each).values()]
        wings = tuple(v for name, v in members if dataclasses.is_dataclass(v) and v.__module__ == name)
        assert len(wings) == len(modules), "each has one dataclass, and imports no settings that wings extend"
        fields = [
            (
                field.name,
                typing.get_type_hints(wing)[field.name],
                dataclasses.field(default=field.default, metadata=field.metadata),
            )
            for wing in wings
            for field in dataclasses.fields(wing)
        ]
        names = {"__module__": cls.__module__, "__doc__": cls.__doc__, "wings": wings}
        return dataclasses.make_dataclass(cls.__name__, fields, bases=(cls,), namespace=names, frozen=True)

    return extend


def add_arguments(parser: argparse._ActionsContainer, cls: type[Any], without: Collection[str] = ()) -> None:
    """Add a flag for each field of `cls` except those in `without`.

    Absent flags stay absent, so that the environment can fill them.
    """
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if field.name in without:
            continue
        names = ["--" + field.name.replace("_", "-"), *field.metadata.get("flags", ())]
        shown = str(field.default) or '""'
        text = f"{field.metadata.get('help', '')} (default: {shown})"
        kind = hints[field.name]
        if kind is bool:
            parser.add_argument(*names, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text)
        else:
            parser.add_argument(
                *names,
                type=_finite if kind is float else kind,
                default=argparse.SUPPRESS,
                help=text.replace("%", "%%"),
                choices=field.metadata.get("choices") or None,
                metavar=None if field.metadata.get("choices") else kind.__name__.upper(),
                nargs="+" if field.metadata.get("many") else None,
            )


def from_namespace(
    cls: type[T],
    namespace: argparse.Namespace,
    env: Mapping[str, str] | None = None,
    fixed: Mapping[str, Any] | None = None,
) -> T:
    """Build `cls` from parsed flags and the environment. Raises ConfigError for a value that does not parse.

    fixed: values of fields that take precedence over flags and environment.
    """
    env = os.environ if env is None else env
    fixed = fixed or {}
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        variable = ENV_PREFIX + field.name.upper()
        if field.name in fixed:
            values[field.name] = fixed[field.name]
        elif hasattr(namespace, field.name):
            value = getattr(namespace, field.name)
            values[field.name] = " ".join(value) if isinstance(value, list) else value
        elif variable in env:
            values[field.name] = _parse(env[variable], hints[field.name], variable)
            choices = field.metadata.get("choices")
            if choices and values[field.name] not in choices:
                raise ConfigError(f"{variable}={env[variable]!r}: choose one of {', '.join(choices)}")
    return cls(**values)


def require(ok: bool, message: str) -> None:
    """Raise ConfigError unless `ok`."""
    if not ok:
        raise ConfigError(message)


def check_not_negative(config: Any, *names: str) -> None:
    """Raise ConfigError for the first of these settings that is negative."""
    for name in names:
        if getattr(config, name) < 0:
            raise ConfigError(f"--{name.replace('_', '-')} must not be negative")


def check_positive(config: Any, *names: str) -> None:
    """Raise ConfigError for the first of these settings that is not positive."""
    for name in names:
        if not getattr(config, name) > 0:
            raise ConfigError(f"--{name.replace('_', '-')} must be positive")


def from_args(cls: type[T], argv: Sequence[str] | None = None, prog: str | None = None) -> T:
    """Build `cls` from a whole command line and the environment."""
    parser = SettingsParser(prog=prog, description=(cls.__doc__ or "").strip().splitlines()[0])
    add_arguments(parser, cls)
    return from_namespace(cls, parser.parse_args(argv))


def to_argv(config: Any) -> list[str]:
    """Return the command line that rebuilds `config`: flags of the fields that differ from their defaults."""
    argv: list[str] = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value == field.default:
            continue
        flag = field.name.replace("_", "-")
        if isinstance(value, bool):
            argv.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            argv.append(f"--{flag}={value}")
    return argv


def _parse(text: str, kind: Any, name: str) -> Any:
    if kind is bool:
        lowered = text.strip().lower()
        if lowered in ("1", "true", "yes", "on"):
            return True
        if lowered in ("0", "false", "no", "off", ""):
            return False
        raise ConfigError(f"{name}={text!r}: expected true or false")
    try:
        return _finite(text) if kind is float else kind(text)
    except (ValueError, argparse.ArgumentTypeError):
        expected = "a finite number" if kind is float else kind.__name__
        raise ConfigError(f"{name}={text!r}: expected {expected}") from None


def _finite(text: str) -> float:
    """Parse a float. Raises ArgumentTypeError, which argparse reports as it is, if it is infinite or undefined."""
    with suppress(ValueError):
        if math.isfinite(value := float(text)):
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is not a finite number")
