"""`trlx-hybrid`: what is loaded, what can run here, what a bug report needs, and the commands of plugins."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import select
import sys
from collections.abc import Sequence
from typing import Any

from . import doctor as environment
from .doctor import package_version
from .errors import HybridError
from .plugins.host import DISABLE_VARIABLE, Host
from .plugins.registry import SLOTS
from .plugins.selection import STOCK


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="trlx-hybrid", description=__doc__)
    parser.add_argument("--version", action="version", version=f"trlx-hybrid {package_version()}")
    commands = parser.add_subparsers(dest="command", required=True)
    plugins = commands.add_parser("plugins", help="list the loaded plugins, their hooks and components")
    plugins.add_argument("--json", action="store_true", help="print JSON")
    plugins.add_argument("--hook", metavar="H", help="only plugins that implement this hook")
    plugins.set_defaults(run=_plugins)
    doctor = commands.add_parser("doctor", help="say what works on this machine, and what to do about the rest")
    doctor.set_defaults(run=_doctor)
    env = commands.add_parser("env", help="print the environment, for a bug report")
    env.set_defaults(run=_env)
    try:
        Host.load().call("trlx_command", commands=commands)
    except HybridError as error:  # the commands above are what helps now
        print(f"plugins add no commands: {error}", file=sys.stderr)
    options = parser.parse_args(arguments)
    try:
        status = int(options.run(options))
        sys.stdout.flush()
    except HybridError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        output = select.poll()
        output.register(sys.stdout, 0)
        if not output.poll(0):  # another pipe's
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more when it ends
        return 1  # the reader has seen enough, as in `trlx-hybrid plugins | head`
    return status


def _plugins(options: Any) -> int:
    host = Host.load()
    shown = [p for p in host.plugins if options.hook is None or options.hook in p.hooks]
    names = {p.name for p in shown} | ({"builtin"} if options.hook is None else set())
    components = [c for slot in SLOTS for c in host.registry.components(slot) if c.plugin in names]
    if options.json:
        fields = ("slot", "name", "plugin", "summary")
        listed = [{field: getattr(c, field) for field in fields} for c in components]
        report = {"plugins": [dataclasses.asdict(p) for p in shown], "components": listed, "disabled": host.disabled}
        print(json.dumps(report, indent=2))
        return 0
    for p in shown:
        print(f"{p.name}  {p.distribution} {p.version}\n    hooks: {', '.join(p.hooks) or 'none'}")
    if not shown:
        print(f"no plugin implements {options.hook}" if options.hook else "no plugins installed")
    if host.disabled:
        print(f"switched off by {DISABLE_VARIABLE}: {', '.join(host.disabled)}")
    if components:
        print("components:")
    for c in components:
        print(f"    {c.slot:8} {c.name:14} {c.summary} ({c.plugin})")
    return 0


def _doctor(options: Any) -> int:
    """Exit status 1 when something needs attention."""
    releases = environment.installed()
    problems = environment.version_problems(releases)
    print("versions   " + ", ".join(f"{name} {release}" for name, release in releases.items()))
    print("devices    " + ("; ".join(environment.devices()) or "CPU only"))
    host = Host.load()
    print(f"engine     {STOCK:14} ready: TRL's own generation")
    for slot in SLOTS:
        for component in host.registry.components(slot):
            reason = component.unavailable()
            print(f"{slot:10} {component.name:14} {'ready' if reason is None else 'not here: ' + reason}")
    for problem in problems:
        print(f"problem    {problem}")
    attention = bool(problems)
    for findings in host.call("trlx_doctor", options=options):
        for finding in findings:
            print(f"{'problem' if finding.problem else finding.topic:10} {finding.text}", flush=True)
            attention |= finding.problem
    print("advice     " + ("see the problems above" if attention else "nothing to do"))
    return 1 if attention else 0


def _env(options: Any) -> int:
    sections = {**environment.system(), **environment.installed()}
    for name, value in sections.items():
        print(f"- {name}: {value}")
    print(f"- devices: {'; '.join(environment.devices()) or 'CPU only'}")
    try:
        loaded = ", ".join(f"{p.name} {p.version} ({p.distribution})" for p in Host.load().plugins) or "none"
    except HybridError as error:  # a bug report must not fail over the bug
        loaded = f"failed to load: {error}"
    print(f"- plugins: {loaded}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
