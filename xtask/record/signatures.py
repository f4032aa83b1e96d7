"""Records the public names of the Python SDK and of its command line.

    python signatures.py FOLDER

Writes FOLDER/signatures.json: every public class with its bases, fields, methods, parameters and
defaults; every function, alias and constant; and every command with its options. Names that start
with an underscore are private.
"""

import dataclasses
import enum
import inspect
import re
import sys
import types as python_types
import typing

import common

MISSING = inspect.Parameter.empty


def text(value):
    """Returns a default or an annotation as text without addresses and module paths of this machine."""
    if isinstance(value, str):
        return value
    if isinstance(value, type) and not isinstance(value, python_types.GenericAlias):
        return value.__qualname__
    if isinstance(value, python_types.FunctionType):
        return f"<function {value.__qualname__}>"
    shown = re.sub(r" at 0x[0-9a-f]+", "", repr(value))
    shown = re.sub(r"\b(?:tinker|typing|typing_extensions|collections\.abc)(?:\.\w+)*\.(?=\w)", "", shown)
    return re.sub(r"<class '([^']+)'>", lambda found: found.group(1).rsplit(".", 1)[-1], shown)


def default_text(value):
    return value if isinstance(value, (bool, int, float, type(None))) else repr(value) if isinstance(value, str) else text(value)


def signature(function):
    """Returns the parameters of a function, one text per parameter, and what it returns."""
    try:
        found = inspect.signature(function)
    except (TypeError, ValueError):
        return None
    shown, star = [], False
    for parameter in found.parameters.values():
        if parameter.name in ("self", "cls"):
            continue
        prefix = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        star |= parameter.kind is parameter.VAR_POSITIONAL
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            shown.append("*")
            star = True
        annotation = "" if parameter.annotation is MISSING else f": {text(parameter.annotation)}"
        default = "" if parameter.default is MISSING else f" = {default_text(parameter.default)}"
        shown.append(f"{prefix}{parameter.name}{annotation}{default}")
    returns = None if found.return_annotation is MISSING else text(found.return_annotation)
    return {"parameters": shown, **({"returns": returns} if returns else {})}


def fields(cls):
    """Returns the fields of a pydantic model, a dataclass or a typed dictionary."""
    if hasattr(cls, "model_fields"):
        return {
            name: text(field.annotation) + ("" if field.is_required() else f" = {default_text(field.get_default())}")
            + ("" if field.default_factory is None else f"{text(field.default_factory)}()")
            for name, field in cls.model_fields.items()
        }
    if dataclasses.is_dataclass(cls):
        shown = {}
        for field in dataclasses.fields(cls):
            default = ""
            if field.default is not dataclasses.MISSING:
                default = f" = {default_text(field.default)}"
            elif field.default_factory is not dataclasses.MISSING:
                default = f" = {text(field.default_factory)}()"
            shown[field.name] = text(field.type) + default
        return shown
    if typing.is_typeddict(cls):
        required = cls.__required_keys__
        return {
            name: text(kind) + ("" if name in required else " (optional)")
            for name, kind in typing.get_type_hints(cls).items()
        }
    return {}


def is_of_sdk(item):
    return (getattr(item, "__module__", None) or "").split(".")[0] == "tinker"


def described_class(cls):
    described = {"kind": "class", "bases": [text(base) for base in cls.__bases__ if base is not object]}
    if issubclass(cls, enum.Enum):
        return {**described, "kind": "enum", "values": {item.name: item.value for item in cls}}
    if found := fields(cls):
        described["fields"] = found
    methods = {}
    for name in dir(cls):
        owner = next((base for base in cls.__mro__ if name in vars(base)), None)
        is_constructor = name == "__init__" and not described.get("fields")
        if owner is None or not is_of_sdk(owner) or (name.startswith("_") and not is_constructor):
            continue
        member = inspect.getattr_static(cls, name)
        if isinstance(member, property):
            methods[name] = {"property": text(inspect.signature(member.fget).return_annotation)}
        elif isinstance(member, (staticmethod, classmethod, python_types.FunctionType)):
            methods[name] = signature(getattr(cls, name))
    if methods:
        described["methods"] = methods
    return described


def described(item):
    if inspect.ismodule(item):
        return {"kind": "module"}
    if isinstance(item, type) and not isinstance(item, python_types.GenericAlias):
        return described_class(item)
    if inspect.isfunction(item):
        return {"kind": "function", **signature(item)}
    return {"kind": "value", "is": text(item)}


def public_names(module):
    names = getattr(module, "__all__", None) or [
        name for name, item in vars(module).items()
        if not name.startswith("_") and not inspect.ismodule(item)
        and (is_of_sdk(item) or typing.get_origin(item) is not None)
    ]
    return {name: described(getattr(module, name)) for name in sorted(names) if not name.startswith("__")}


def described_option(option):
    import click

    shown = {"names": list(option.opts) + list(option.secondary_opts), "type": option.type.name}
    if isinstance(option.type, click.Choice):
        shown["choices"] = list(option.type.choices)
    if option.required:
        shown["required"] = True
    if option.nargs != 1:
        shown["nargs"] = option.nargs
    for flag in ("is_flag", "multiple"):
        if getattr(option, flag, False):
            shown[flag] = True
    # `UNSET` is how newer releases of click say that there is no default.
    if option.default is not None and "UNSET" not in repr(option.default) and not callable(option.default):
        shown["default"] = option.default
    if getattr(option, "help", None):
        shown["help"] = option.help
    return shown


def commands(command, path, found):
    import click

    context = click.Context(command)
    found[" ".join(path)] = {
        "help": inspect.cleandoc(command.help or ""),
        "parameters": {option.name: described_option(option) for option in command.params},
    }
    if isinstance(command, click.Group):
        for name in sorted(command.list_commands(context)):
            commands(command.get_command(context, name), [*path, name], found)
    return found


def main(folder):
    import tinker
    from tinker import types
    from tinker.cli.__main__ import main_cli
    from tinker.lib import public_interfaces

    clients, data = public_names(public_interfaces), public_names(types)
    # The package exports most names a second time. They are described where they come from.
    exported = {
        name: "clients" if name in clients else "types" if name in data else item
        for name, item in public_names(tinker).items()
    }
    common.save(folder, "signatures.json", {
        "version": tinker.__version__,
        "tinker": exported,
        "clients": clients,
        "types": data,
        "commands": commands(main_cli, ["tinker"], {}),
    })


if __name__ == "__main__":
    main(*sys.argv[1:])
