"""Names of headless Services for the pods of a test, as CoreDNS answers them: dnsmasq, told what is ready."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

from tests.deploy.kubernetes.control_plane import ControlPlane

INTERVAL_SECONDS = 0.3


@contextlib.contextmanager
def service_names(plane: ControlPlane, address: str, folder: Path) -> Iterator[None]:
    """Serve DNS at `address`, port 53, for the time of a `with`."""
    hosts = folder / "hosts"
    hosts.touch()
    command = ["dnsmasq", "--keep-in-foreground", "--conf-file=/dev/null", "--user=root", "--pid-file="]
    command += ["--no-resolv", "--no-hosts", f"--addn-hosts={hosts}", "--local=/cluster.local/"]
    command += [f"--listen-address={address}", "--bind-interfaces", f"--log-facility={folder / 'dnsmasq.log'}"]
    process = subprocess.Popen(command)
    stop = threading.Event()

    def follow() -> None:
        known = ""
        while not stop.wait(INTERVAL_SECONDS):
            with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):  # kubectl is asked again
                text = "".join(f"{address} {name}\n" for name, address in ready_addresses(plane))
                if text != known:
                    known = text
                    hosts.write_text(text)
                    process.send_signal(signal.SIGHUP)

    thread = threading.Thread(target=follow)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        process.terminate()
        process.wait()


def ready_addresses(plane: ControlPlane) -> list[tuple[str, str]]:
    """(name, address) of every pod that is ready behind a Service."""
    found = set()
    for slice_ in plane.get("endpointslices", "--all-namespaces")["items"]:
        metadata = slice_["metadata"]
        name = f"{metadata['labels']['kubernetes.io/service-name']}.{metadata['namespace']}.svc.cluster.local"
        for endpoint in slice_["endpoints"] or []:
            if endpoint["conditions"].get("ready"):
                found |= {(name, address) for address in endpoint["addresses"]}
    return sorted(found)
