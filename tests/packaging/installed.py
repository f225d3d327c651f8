# SPDX-License-Identifier: Apache-2.0
"""What is asked of a machine that packages are installed on: services that work, and what is left."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Sequence

import pytest

from testbed.machines import Machine

SERVICES = ("backsight-node", "backsight-probes", "backsight-coordinator")

# What apt, dpkg, rpm and the services' logs leave of anything that was ever installed.
OF_THE_SYSTEM = re.compile(
    r"/(proc|sys|dev|run|tmp|dist|root/\.rpmdb|var/(cache|log|tmp|lib/(apt|dpkg)))(/|$)"
    r"|/var/lib/systemd/(catalog|random-seed|timers)(/|$)"
    r"|/etc/(passwd|group|shadow|gshadow)-$|/etc/ld\.so\.cache$|/etc/\.pwd\.lock$"
)

# What `systemd-analyze security` may say at most, from 0 (least) to 10; the issue that asks for units has it.
EXPOSURE_MAX = {"backsight-node": 2.0, "backsight-coordinator": 2.0, "backsight-probes": 3.0}

CONFIGURATION = """
coordinator:
  endpoint: 127.0.0.1:4770
allow:
  users: [nobody]
"""

AS_NOBODY = ("setpriv", "--reuid=nobody", "--clear-groups")

APPLICATION = """
import secrets, sys, time
import backsight

assert backsight.wait_attached(30.0)
for number in range(int(sys.argv[1])):
    trace_id = secrets.token_hex(16)
    with backsight.Trace(trace_id) as trace:
        trace.span_start(1, 0, time.time_ns(), "GET /cart")
        trace.span_end(1, time.time_ns())
        trace.trigger("by-hand", "it is to be collected")
    print(trace_id, flush=True)
    sys.stdin.readline()
"""


def files(machine: Machine) -> set[str]:
    return {
        path
        for path in machine.run("find", "/", "-xdev").splitlines()
        if not OF_THE_SYSTEM.match(path)
    }


def users(machine: Machine) -> list[str]:
    return machine.sh("getent passwd; getent group").splitlines()


def check_services(machine: Machine) -> None:
    """All are there, and say how they are."""
    for service in SERVICES:
        machine.run("systemctl", "is-active", service)
        machine.run("systemctl", "is-enabled", service)
        said = machine.run("systemd-analyze", "security", "--no-pager", service)
        machine.run("systemctl", "reload", service)
        # systemd goes on once it has sent the signal.
        await_entry(machine, service, ".yaml: reloaded; nothing taken up", "--boot")
        exposure = re.search(r"exposure level for \S+: ([\d.]+)", said)
        assert exposure is not None, said
        assert float(exposure[1]) <= EXPOSURE_MAX[service]
    machine.run("systemctl", "is-active", "backsight-node.socket")
    # To end the node would not free the pool, which counts as its memory.
    # Of the unit: it is not heeded where nobody has CAP_SYS_RESOURCE, as where tests may run.
    adjusted = machine.run("systemctl", "show", "--property=OOMScoreAdjust", "backsight-node")
    assert adjusted == "OOMScoreAdjust=-900\n"
    status = machine.run("systemctl", "status", "--no-pager", "backsight-node")
    assert re.search(r'Status: ".*pool holds .*; 0 triggers unreported"', status)
    entries = machine.run("journalctl", "--boot", "-u", "backsight-node", "-o", "verbose")
    assert "    NODE=web-1\n" in entries
    for port, own in (4771, "backsight_node_pool_capacity_bytes"), (4772, "backsight_coordinator_"):
        said = machine.run("curl", "-s", f"localhost:{port}/metrics")
        assert own in said
        # By which one sees that it was restarted; a sandbox may hide what that is read from.
        assert "\nprocess_start_time_seconds " in said
    node = json.loads(machine.run("backsightctl", "status", "--json"))
    assert node["probes_connected"]


def restart_node(machine: Machine) -> None:
    machine.run("systemctl", "restart", "backsight-node")


def kill(machine: Machine, service: str, by: str = "KILL") -> None:
    """Until systemd has started the next one."""
    last = machine.run("journalctl", "--lines=1", "--show-cursor", "--output=cat")
    cursor = last.rpartition("-- cursor: ")[2].strip()
    machine.run("systemctl", "kill", "--kill-whom=main", f"--signal={by}", service)
    await_entry(machine, service, "Scheduled restart job", f"--after-cursor={cursor}")
    machine.run("systemctl", "start", service)  # returns when it is ready


def await_entry(machine: Machine, service: str, text: str, since: str) -> None:
    """Until the journal has that, of a service."""
    follow = ("journalctl", "--follow", "--lines=all", "--output=cat", f"--unit={service}", since)
    with machine.popen(*follow) as journal:
        assert journal.stdout is not None
        try:
            assert any(text in line for line in journal.stdout)
        finally:
            # It would go on; the group has what runs there too.
            os.killpg(journal.pid, signal.SIGTERM)


def kill_node(machine: Machine) -> None:
    kill(machine, "backsight-node")


def end_node(machine: Machine) -> None:
    """By somebody who did not know better: it is not systemd that has it end."""
    kill(machine, "backsight-node", "TERM")


def hang_node(machine: Machine) -> None:
    """It does not end when it is told to; the watchdog does not look at it then."""
    of_node = ("systemctl", "show", "--value", "--property=ControlGroup", "backsight-node")
    mounts = ("findmnt", "--noheadings", "--output=TARGET", "--types=cgroup2")
    group = machine.run(*mounts).strip() + machine.run(*of_node).strip()
    # A frozen process takes no signal but SIGKILL.
    machine.sh(f"echo 1 >{group}/cgroup.freeze")
    with machine.popen("systemctl", "restart", "backsight-node") as restart:
        await_entry(machine, "backsight-node", "State 'stop-sigterm' timed out. Killing.", "--boot")
        # Its successor is in the same group.
        machine.sh(f"echo 0 >{group}/cgroup.freeze")
    assert restart.returncode == 0


def misconfigure_node(machine: Machine) -> None:
    """It does not start, and goes on where it was once it can."""
    machine.sh("echo 'nonsense: 1' >>/etc/backsight/node.yaml")
    with pytest.raises(RuntimeError, match=r"Job for backsight-node\.service failed"):
        restart_node(machine)
    machine.sh("sed -i '/^nonsense/d' /etc/backsight/node.yaml")
    machine.run("systemctl", "start", "backsight-node")
    log = machine.run("journalctl", "--boot", "-u", "backsight-node", "-o", "cat")
    wrong = log.index("nonsense")
    assert "clients of before the restart" in log[wrong:]


def configure(machine: Machine, more: str = "") -> None:
    """The one step by hand: the YAML."""
    with (machine.root / "etc/backsight/node.yaml").open("a") as configuration:
        configuration.write(CONFIGURATION + more)
    restart_node(machine)


def check_traces(machine: Machine, ends: Sequence[Callable[[Machine], None]]) -> None:
    """What applications trigger is collected, whatever ends between."""
    (machine.root / "srv/app.py").write_text(APPLICATION)
    number = str(1 + len(ends))
    with machine.popen(*AS_NOBODY, "python3", "/srv/app.py", number) as application:
        assert application.stdin is not None and application.stdout is not None
        fired = [application.stdout.readline().strip()]
        for end in ends:
            end(machine)
            application.stdin.write("\n")
            application.stdin.flush()
            fired.append(application.stdout.readline().strip())
        application.stdin.close()
    (machine.root / "srv/app.py").unlink()
    assert verdicts(machine, fired) == dict.fromkeys(fired, "coherent")


def verdicts_now(machine: Machine) -> dict[str, str]:
    """By trace, of all that the coordinator has."""
    listed = machine.run("backsightctl", "traces", "--limit", "0", "--json").splitlines()
    return {trace["trace_id"]: trace["verdict"]["kind"] for trace in map(json.loads, listed)}


def verdicts(machine: Machine, wanted: Sequence[str]) -> dict[str, str]:
    """By trace, once each is judged."""
    while True:
        found = verdicts_now(machine)
        if all(found.get(trace, "provisional") != "provisional" for trace in wanted):
            return {trace: found[trace] for trace in wanted}
