"""Compares a recording with the fixtures.

    python report.py FIXTURES RECORDING [MARKDOWN]

Prints what a release of the SDK changes on the wire, in signatures, in the command line and in its
behaviour, from the older to the newer of the two versions, and writes it to the file MARKDOWN.
"""

import collections
import difflib
import itertools
import json
import os
import re
import sys

import common

# Numbers of bytes, which follow from the bodies.
IGNORED = ("content-length",)
# The decoded forms of these are compared.
IGNORED += ("body_base64", "handle")
# Files beside the recorded exchanges.
NOT_COMPARED = ("not-recorded.json", "signatures.json")
# Limits for lines, names and characters that are shown.
MAX_LINES = 6
MAX_OUTPUT_LINES = 4
MAX_NAMES = 4
MAX_TEXT = 160


HEADER = """\
Written by `cargo xtask record`, which runs both releases against servers on the loopback interface; see
`fixtures/README.md`. Versions, lengths and line numbers are left out. In a block, `-` is the older release and `+` the
newer one, first in the requests of the command, then in its output, without lines that an earlier block has."""


def version_key(version):
    return [int(part) if part.isdigit() else part for part in re.split(r"[.+-]", version)]


class Side:
    """The recorded files of one version of the SDK."""

    def __init__(self, folder):
        self.folder = folder
        self.signatures = common.load(folder, "sdk", "signatures.json")
        self.version = self.signatures["version"]

    def path(self, *parts):
        return os.path.join(self.folder, *parts)

    def text(self, *parts):
        """Returns a file without the version of the SDK, which would differ everywhere."""
        if not os.path.exists(path := self.path(*parts)):
            return None
        with open(path, newline="") as file:
            text = file.read().replace(self.version, "<version>")
        # Lines of the SDK's source move with every release.
        text = re.sub(r'(<site-packages>/tinker/[^":]+(?:", line |:))\d+', r"\1N", text)
        # Colours and cursor movements.
        text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)
        # Boxes are as wide as their content.
        return re.sub(r"[─━]{2,}", "──", re.sub(r" {2,}", " ", text))

    def json(self, *parts):
        text = self.text(*parts)
        return None if text is None else json.loads(text)

    def not_recorded(self, group):
        path = self.path(group, "not-recorded.json")
        return common.load(path) if os.path.exists(path) else {}


def flat(value, path=""):
    """Returns the leaves of a JSON value by path."""
    if isinstance(value, dict) and value:
        return {leaf: item for name, inner in value.items() if name not in IGNORED for leaf, item in flat(inner, f"{path}.{name}").items()}
    if isinstance(value, list) and value:
        return {leaf: item for number, inner in enumerate(value) for leaf, item in flat(inner, f"{path}[{number}]").items()}
    return {path.lstrip("."): value}


def shown(value):
    text = " ".join(value.split()) if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + "…"


def changes(old, new):
    """Returns the differences of two JSON values, one text per leaf."""
    old, new = flat(old), flat(new)
    found = []
    for path in [*old, *(path for path in new if path not in old)]:
        if path not in new:
            found.append(f"`{path}` is gone (was `{shown(old[path])}`)")
        elif path not in old:
            found.append(f"`{path}` is new: `{shown(new[path])}`")
        elif old[path] != new[path]:
            found.append(f"`{path}`: `{shown(old[path])}` → `{shown(new[path])}`")
    return found


def names(items, limit=MAX_NAMES):
    items = list(items)
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return ", ".join(f"`{item}`" for item in items[:limit]) + more


def grouped(by_file):
    """Returns lines for the changes of many files. A change that several files share is one line."""
    files = collections.defaultdict(list)
    for file, found in by_file.items():
        files[tuple(found)].append(file)
    lines = []
    for found, owners in files.items():
        lines.append(f"- {names(owners)}")
        lines += [f"  - {change}" for change in found[:MAX_LINES]]
        if len(found) > MAX_LINES:
            lines.append(f"  - and {len(found) - MAX_LINES} more")
    return lines


def files_of(side, group, suffix):
    return {file for file in os.listdir(side.path(group)) if file.endswith(suffix)} - set(NOT_COMPARED)


def requests(old, new, group, suffix):
    """Compares the requests of a folder."""

    def described(side, file):
        recorded = side.json(group, file)
        request = recorded.get("request", recorded)
        if "path" not in request:
            return f"`{file}`"
        return f"`{request['method']} {request['path']}` (`{file.removesuffix(suffix)}`)"

    both = files_of(old, group, suffix), files_of(new, group, suffix)
    lines = [f"- new: {described(new, file)}" for file in sorted(both[1] - both[0])]
    lines += [f"- gone: {described(old, file)}" for file in sorted(both[0] - both[1])]
    by_file = {}
    for file in sorted(both[0] & both[1]):
        if found := changes(old.json(group, file), new.json(group, file)):
            by_file[file.removesuffix(suffix)] = found
    return lines + grouped(by_file)


def wire(old, new):
    return requests(old, new, "wire", ".request.json") + requests(old, new, "sdk", ".json")


def parameters(item):
    """Returns the parameters and the result of a method."""
    if "property" in item:
        return [item["property"]]
    return [*item["parameters"], *([f"-> {item['returns']}"] if "returns" in item else [])]


def members(item):
    """Returns what belongs to a class, with the parts that may change."""
    found = {name: [f"{name}: {kind}"] for name, kind in item.get("fields", {}).items()}
    found |= {f"{name}()": parameters(method) for name, method in item.get("methods", {}).items() if method}
    found |= {name: [repr(value)] for name, value in item.get("values", {}).items()}
    return found or ({"": [item["is"]]} if "is" in item else {})


def with_members(name, item):
    found = [member for member in members(item) if member and not member.endswith("_async()")]
    return f"`{name}`" + (f" with {names(found, 12)}" if found else "")


def member_changes(was, now):
    lines = [f"  - new: `{name}`: `{', '.join(now[name])}`" for name in now if name not in was]
    lines += [f"  - gone: `{name}`" for name in was if name not in now]
    for name in now:
        if name in was and was[name] != now[name]:
            before = ", ".join(part for part in was[name] if part not in now[name])
            after = ", ".join(part for part in now[name] if part not in was[name])
            label = f"`{name}`: " if name else ""
            lines.append(f"  - {label}`{before}` → `{after}`")
    return lines


def signatures(old, new):
    lines = []
    before, after = old.signatures["tinker"], new.signatures["tinker"]
    if exported := [name for name in after if name not in before]:
        lines.append(f"- the package exports {names(exported, 20)}")
    if gone := [name for name in before if name not in after]:
        lines.append(f"- the package no longer exports {names(gone, 20)}")
    for space, prefix in (("tinker", ""), ("clients", ""), ("types", "types.")):
        # The names that the package exports a second time are texts.
        before, after = ({name: item for name, item in side.signatures[space].items() if isinstance(item, dict)} for side in (old, new))
        lines += [f"- new: {with_members(prefix + name, after[name])}" for name in after if name not in before]
        lines += [f"- gone: `{prefix}{name}`" for name in before if name not in after]
        for name in after:
            if name in before and (found := member_changes(members(before[name]), members(after[name]))):
                lines += [f"- `{prefix}{name}`", *found]
    return lines


def without_repetitions(text):
    return [line for line, _ in itertools.groupby((text or "").splitlines())]


def differing(old, new):
    """Returns the lines that differ between two lists of lines, without the lines of boxes."""
    diff = difflib.unified_diff(old, new, lineterm="", n=0)
    return [line[:MAX_TEXT] for line in diff if not line.startswith(("---", "+++", "@@")) and re.search(r"\w", line)]


def shortened(lines, limit):
    more = [f"… and {len(lines) - limit} more"] if len(lines) > limit else []
    return lines[:limit] + more


def request_lines(outcome):
    """Returns the requests of a command, one line each."""
    lines = []
    for request in outcome.get("requests", []):
        query = "&".join(f"{name}={value}" for name, value in request.get("query", {}).items())
        path = request["path"] + (f"?{query}" if query else "")
        body = f" {json.dumps(request['body'])}" if request.get("body") else ""
        times = f" ({request['repeated']} times)" if "repeated" in request else ""
        lines.append(f"{request['method']} {path}{body} → {request['status']}{times}")
    return lines


def command_changes(old, new):
    """Returns, for each recorded command that changed, its exit codes and requests, and its output."""
    index = [side.json("cli", "index.json") for side in (old, new)]
    for case in index[1]:
        if case not in index[0] or "kept" in index[1][case]:
            continue
        before, after = (entries[case]["modes"] for entries in index)
        summary = []
        for mode in after:
            if mode not in before:
                continue
            codes = before[mode]["exit_code"], after[mode]["exit_code"]
            if codes[0] != codes[1]:
                summary.append(f"exit code {codes[0]} → {codes[1]}")
            summary += shortened(differing(request_lines(before[mode]), request_lines(after[mode])), MAX_LINES)
        output = {}
        for suffix in ("table.txt", "err.txt", "txt", "json", "json-mode.txt", "json-mode.err.txt"):
            file = f"{case}.{suffix}"
            found = differing(*(without_repetitions(side.text("cli", file)) for side in (old, new)))
            if found and not (output and "json" in suffix):
                output[file] = found
        if summary or output:
            yield case, tuple(dict.fromkeys(summary)), output


def commands(old, new):
    lines = []
    before, after = old.signatures["commands"], new.signatures["commands"]
    lines += [f"- new: `{name}`" for name in after if name not in before]
    lines += [f"- gone: `{name}`" for name in before if name not in after]
    for name in after:
        if name in before and (found := changes(before[name], after[name])):
            lines += [f"- `{name}`", *(f"  - {change}" for change in found)]
    alike = collections.defaultdict(list)
    for case, summary, output in command_changes(old, new):
        alike[summary or case].append((case, summary, output))
    seen = set()
    for cases in alike.values():
        _, summary, output = cases[0]
        block = list(summary)
        for file, found in output.items():
            # Many commands print the same warning.
            if first := [line for line in found if line not in seen]:
                block += [f"{file}:", *shortened(first, MAX_OUTPUT_LINES)]
            seen.update(found)
        example = "; output of the first" if len(cases) > 1 and output else ""
        lines += [f"- {names((case for case, _, _ in cases), 12)}{example}", "", "  ```diff", *(f"  {line}" for line in block), "  ```", ""]
    return lines


def behaviour(old, new):
    by_file = {}
    for file in sorted(files_of(old, "behaviour", ".json") & files_of(new, "behaviour", ".json")):
        before, after = old.json("behaviour", file), new.json("behaviour", file)
        if found := changes(before, after):
            by_file[file] = found
    return grouped(by_file)


def not_recorded(side):
    lines = []
    for group in ("wire", "cli", "behaviour"):
        lines += [f"- {group}: {name}: `{reason}`" for name, reason in side.not_recorded(group).items()]
    return lines


def report(fixtures, recording):
    old, new = sorted((fixtures, recording), key=lambda side: version_key(side.version))
    sections = {
        "On the wire": wire(old, new),
        "Signatures": signatures(old, new),
        "Command line": commands(old, new),
        "Behaviour": behaviour(old, new),
        f"Not recorded with {recording.version}": not_recorded(recording),
    }
    title = f"# Changes of the Python SDK from {old.version} to {new.version}"
    if old.version == new.version:
        title = f"# Changes of the recording of the Python SDK {new.version}"
    lines = [title, ""] + ([] if old.version == new.version else [HEADER, ""])
    for heading, found in sections.items():
        if found:
            lines += [f"## {heading}", "", *found, ""]
    if not any(sections.values()):
        lines.append("None.")
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


def main(fixtures, recording, markdown=None):
    fixtures, recording = Side(fixtures), Side(recording)
    text = report(fixtures, recording)
    print(text)
    if markdown:
        with open(markdown, "w") as file:
            file.write(text)


if __name__ == "__main__":
    main(*sys.argv[1:])
