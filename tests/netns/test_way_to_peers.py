"""A program that is attached on the way to the peers, and may not be used: an error with what to type.

Where it may be used: ``test_attach.py``.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lab_team import told_by
from tailbound_lab.lab.cluster import Cluster

pytestmark = [pytest.mark.needs("root", "netns", "bpf", "bcc", "headers"), pytest.mark.usefixtures("warm_start")]

REFUSED = """
import grp, json, os, sys
from tailbound import cli
from tailbound.datapath.select import open_datapath
from tailbound.errors import TailboundError
from tailbound.transport.config import Config

towards = sys.argv[1]
told = {}

def attempt(name, user=0, datapath="auto", **settings):
    # as that user, in a process of its own; what it says comes back by a pipe
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            if user:
                os.setgroups([])
                os.setgid(user)
                os.setuid(user)
            try:
                config = Config(rank=0, ranks=2, ring_mib=1.0, **settings)
                path = open_datapath(datapath, None, config, towards)
                said = [path.name, *path.endpoint]
                path.close()
            except TailboundError as error:
                said = [type(error).__name__, str(error)]
            os.write(theirs, json.dumps(said).encode())
        finally:
            os._exit(0)
    os.close(theirs)
    told[name] = json.loads(os.read(ours, 1 << 16))
    os.waitpid(pid, 0)

attempt("nothing attached")
assert cli.main(["attach", "data0", "--ring", "1"]) == 0
attempt("attached for root", user=65534)
attempt("usable")
path = open_datapath("auto", None, Config(rank=0, ranks=2), towards)
attempt("another job")
path.close()
attempt("udp beside it", datapath="udp", port=path.endpoint[1])
assert cli.main(["detach", "data0"]) == 0
assert cli.main(["attach", "data0", "--ring", "1", "--group", grp.getgrgid(1).gr_name]) == 0
attempt("attached for others", user=65534)
assert cli.main(["detach", "data0"]) == 0
print(json.dumps(told))
"""


def test_an_attached_program_that_may_not_be_used_is_an_error_with_what_to_type(
    tailbound_lab: Callable[..., Cluster],
) -> None:
    lab = tailbound_lab(workers=2)
    told, _, _ = told_by(lab, REFUSED, lab.workers[1].address)
    own = lab.workers[0].address
    assert told["nothing attached"][:2] == ["udp", own]
    assert told["usable"] == ["xdp", own, 5515]
    kind, why = told["attached for root"]
    assert kind == "CapabilityError"
    assert "attached for root alone" in why
    assert "attach data0 --replace --group nogroup" in why
    kind, why = told["another job"]
    assert kind == "ConfigError"
    assert "one rank and one job an interface" in why
    assert told["udp beside it"] == ["udp", own, 5516]
    kind, why = told["attached for others"]
    assert kind == "CapabilityError"
    assert "usermod -aG daemon $USER" in why
    assert why.endswith("TAILBOUND_DATAPATH=udp")
