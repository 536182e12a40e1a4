"""The software bill of materials of a release, as CycloneDX JSON, from the metadata of the installed packages.

    python release/sbom.py dist/sbom.json        run in an environment that has loopwright's required packages

It lists loopwright and everything its required packages bring, with versions, licences and who needs whom. Two runs in
the same environment write the same bytes.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tomllib
import uuid
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
SPECIFICATION = "1.6"


def project() -> tuple[str, str, str, list[str]]:
    """Name, version, licence and required packages of loopwright, from the checkout."""
    table = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    source = (ROOT / "src" / "loopwright" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"', source, flags=re.MULTILINE)
    assert found is not None, "src/loopwright/__init__.py has no __version__"
    return table["name"], found[1], table["license"], table["dependencies"]


def purl(name: str, version: str) -> str:
    """The address of a package in the form that scanners of vulnerabilities read."""
    return f"pkg:pypi/{canonicalize_name(name)}@{version.replace('+', '%2B')}"


def needed(requirements: list[str] | None) -> list[str]:
    """The names of those requirements that apply here, without those of extras."""
    parsed = [Requirement(each) for each in requirements or []]
    kept = [each.name for each in parsed if each.marker is None or each.marker.evaluate({"extra": ""})]
    return sorted({canonicalize_name(name) for name in kept})


def closure(names: list[str]) -> dict[str, metadata.Distribution]:
    """These packages and all they need, by name; one that is not installed is an error."""
    found: dict[str, metadata.Distribution] = {}
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name] = metadata.distribution(name)
            waiting += needed(found[name].requires)
    return dict(sorted(found.items()))


def licences(package: metadata.Distribution) -> list[dict[str, Any]]:
    """The licence that a package declares: an SPDX expression, a classifier, or a short text."""
    expression = package.metadata.get("License-Expression")
    if expression:
        return [{"expression": expression}]
    kinds = [each for each in package.metadata.get_all("Classifier") or [] if each.startswith("License :: ")]
    named = sorted({each.rpartition(" :: ")[2] for each in kinds})
    text = (package.metadata.get("License") or "").strip()
    if not named and text and len(text) < 80:
        named = [text]
    return [{"license": {"name": name}} for name in named]


def component(package: metadata.Distribution) -> dict[str, Any]:
    name, version = package.metadata["Name"], package.version
    entry = {"type": "library", "bom-ref": purl(name, version), "name": name, "version": version}
    return {**entry, "purl": purl(name, version), "licenses": licences(package)}


def document() -> dict[str, Any]:
    name, version, licence, requirements = project()
    root = {"type": "library", "bom-ref": purl(name, version), "name": name, "version": version}
    root |= {"purl": purl(name, version), "licenses": [{"expression": licence}]}
    packages = closure(needed(requirements))
    references = {each: purl(each, package.version) for each, package in packages.items()}
    edges = {purl(name, version): needed(requirements)}
    edges |= {references[each]: needed(package.requires) for each, package in packages.items()}
    body = {
        "metadata": {"timestamp": timestamp(), "component": root},
        "components": [component(package) for package in packages.values()],
        "dependencies": [
            {"ref": reference, "dependsOn": [references[each] for each in names]} for reference, names in edges.items()
        ],
    }
    serial = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(body, sort_keys=True))
    head = {"bomFormat": "CycloneDX", "specVersion": SPECIFICATION, "serialNumber": f"urn:uuid:{serial}", "version": 1}
    return {**head, **body}


def timestamp() -> str:
    """The time of the release: that of its commit, which `make dist` passes on."""
    seconds = int(os.environ.get("SOURCE_DATE_EPOCH", "0"))
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%SZ}"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(document(), indent=2) + "\n", encoding="utf-8")
