"""The command line `trlx-hybrid`: lists the loaded plugins, checks what can run on this machine, prints what a bug
report needs, creates plugins, and runs the commands of plugins."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import select
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import entry_points

from ..errors import ConfigError, HybridError, did_you_mean, nearest
from ..plugins import hookspecs
from ..plugins.host import DISABLE_VARIABLE, ENTRY_POINT_GROUP, Host
from ..plugins.registry import SLOTS
from ..plugins.selection import STOCK
from ..versions import package_version, release_of
from . import doctor as environment
from . import environments, new, train

ADDED_BY = {"trajectories": "trajectories", "report": "trajectories", "reshard-plan": "reshard", "launch": "ray"}
"""The commands that plugins of this project add, each with the name of its plugin."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line `trlx-hybrid` and return the exit status.

    Args:
        arguments: the words after the program's name; by default the words with which this process was started.
    """
    parser = argparse.ArgumentParser(
        prog="trlx-hybrid",
        description="Command line of trlx-hybrid, which extends TRL's trainers with plugins.",
        epilog=f"{DISABLE_VARIABLE}=name,name disables plugins.",
    )
    parser.add_argument("--version", action="version", version=f"trlx-hybrid {package_version()}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND [OPTIONS]", dest="command", required=True)

    def add(name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        command: argparse.ArgumentParser = commands.add_parser(name, help=text, description=f"{text.capitalize()}.")
        command.set_defaults(run=run)
        return command

    plugins = add("plugins", _plugins, "list the loaded plugins, their hooks and components")
    plugins.add_argument("--json", action="store_true", help="print JSON")
    plugins.add_argument("--hook", metavar="HOOK", help="only plugins that implement this hook, e.g. trlx_rollout_end")
    add("doctor", _doctor, "say what works on this machine, and what to do about the rest")
    add("env", _env, "print versions, devices and plugins, for a bug report")
    train.add_command(commands)
    environments.add_command(commands)
    new.add_command(commands)
    try:
        Host.load().call("trlx_command", commands=commands)
    except HybridError as error:  # go on: the commands above may help with this error
        print(f"The commands of plugins are not available: {error}", file=sys.stderr)
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words:
        parser.print_help(sys.stderr)
        return 2
    if not words[0].startswith("-") and words[0] not in commands.choices:
        parser.error(_unknown_command(words[0], commands.choices))
    options, unread = parser.parse_known_args(words)
    if unread:
        command, name = commands.choices[options.command], unread[0].partition("=")[0]
        known = [option for action in command._actions for option in action.option_strings]
        hint = f" It goes after {options.command!r}." if name in known else did_you_mean(name, known)
        command.error(f"unrecognized argument {name}.{hint}")
    try:
        status = int(options.run(options))
        sys.stdout.flush()
    except HybridError as error:
        print(f"error: {error}\nSee {error.page} in the repository of trlx-hybrid.", file=sys.stderr)
        return 1
    except BrokenPipeError:
        output = select.poll()
        output.register(sys.stdout, 0)
        if not output.poll(0):  # the error is of another pipe
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at exit
        return 1  # the reader has seen enough, as in `trlx-hybrid plugins | head`
    return status


def _unknown_command(name: str, commands: Iterable[str]) -> str:
    """Return an error message for an unknown command, with the most similar command, and the plugin to install if that
    command comes with one."""
    meant = name if name in ADDED_BY else nearest(name, {*commands, *ADDED_BY})
    hint = f" Did you mean {meant!r}?" if meant not in ("", name) else ""
    if meant in ADDED_BY and meant not in commands:
        plugin = ADDED_BY[meant]
        if plugin in Host().disabled:
            hint += f" Plugin {plugin} is disabled by {DISABLE_VARIABLE}."
        elif release_of(f"trlx-hybrid-{plugin}") is None:
            hint += f" Install trlx-hybrid-{plugin}."
    return f"no command {name!r}.{hint} Commands: {', '.join(commands)}."


def _plugins(options: argparse.Namespace) -> int:
    hooks = [name for name in dir(hookspecs) if name.startswith("trlx_")]
    if options.hook is not None and options.hook not in hooks:
        raise ConfigError(
            f"--hook {options.hook}: no such hook.{did_you_mean(options.hook, hooks)} Hooks: {', '.join(hooks)}."
        )
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
        installed = {entry_point.name for entry_point in entry_points(group=ENTRY_POINT_GROUP)}
        named = (name if name in installed else f"{name} (not installed)" for name in host.disabled)
        print(f"disabled by {DISABLE_VARIABLE}: {', '.join(named)}")
    if components:
        print("components (slot, name, description, plugin):")
    width = max(len(slot) for slot in SLOTS)
    wide = max([len(STOCK), *(len(c.name) for c in components)])
    if options.hook is None:
        print(f"    {'engine':{width}} {STOCK:{wide}} TRL's own generation (builtin)")
    for c in components:
        print(f"    {c.slot:{width}} {c.name:{wide}} {c.summary} ({c.plugin})")
    return 0


def _doctor(options: argparse.Namespace) -> int:
    """Print what works on this machine; return exit status 1 when something needs attention."""
    releases = environment.installed()
    problems = environment.version_problems(releases)
    machine = [
        "versions   " + ", ".join(f"{name} {release}" for name, release in releases.items()),
        "devices    " + ("; ".join(environment.devices()) or "CPU only"),
    ]
    told = [f"problem    {problem}" for problem in problems]
    try:
        host = Host.load()
    except HybridError:  # perhaps because of a version problem
        print("\n".join([*machine, *told]))
        raise
    checks = host.call("trlx_doctor", options=options)  # options that contradict each other are refused first
    print("\n".join(machine))
    wide = max(len(c.name) for slot in SLOTS for c in host.registry.components(slot))
    print(f"engine     {STOCK:{wide}} available: TRL's own generation")
    for slot in SLOTS:
        for component in host.registry.components(slot):
            reason = component.out_of_place()
            print(f"{slot:10} {component.name:{wide}} {'available' if reason is None else f'not available: {reason}'}")
    if told:
        print("\n".join(told))
    attention = bool(problems)
    for findings in checks:
        for finding in findings:
            head = f"problem    {finding.topic}:" if finding.problem else f"{finding.topic:10}"
            print(f"{head} {finding.text}", flush=True)
            attention |= finding.problem
    print("result     " + ("see the problems above" if attention else "no problems found"))
    return 1 if attention else 0


def _env(options: argparse.Namespace) -> int:
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
