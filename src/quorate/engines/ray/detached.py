"""A detached run: a run whose coordinator is an actor's process on the cluster's head node.

The run outlives the command that started the run. A lost coordinator is started again and resumes.
The run directory names the run, so that the same command reaches the same run again.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayError

from quorate.engines.processes.script import Script
from quorate.engines.ray.cluster import connected
from quorate.errors import RunError, UserError
from quorate.machine.limits import ACTOR_ANSWER_S, LAST_OUTPUT_S

NAMESPACE = "quorate"  # of the cluster's named actors
HEAD = {"node:__internal_head__": 0.001}  # Ray's name for the head node's resource

KEPT_BYTES = 1 << 20  # of the newest output
MOST_STARTS = 4  # of a coordinator after kills, perhaps by the kernel for lack of memory


class DetachedOutput(NamedTuple):
    """The output of a run since the last request."""

    text: bytes
    until: int  # bytes printed in all
    code: int | None  # the exit code; None: the run goes on


class DetachedDriver:
    """An actor that runs a script to its end, in a process of its own. Ray calls its methods.

    Args:
        script: the fields of the script, as on the host of the command.
        folder: a folder with the script, sent to this process's working directory; None: none was
            sent.
        options: the words of ``quorate run`` before the script.
    """

    def __init__(self, script: dict[str, Any], folder: str | None, options: list[str]) -> None:
        self._asked = (script, options)
        run = Script(**script)
        if folder is not None:
            run = run.within(Path(folder), Path.cwd())
            options = [*options, "--working-dir", str(Path.cwd())]
        address = ray.get_runtime_context().gcs_address
        # -P: without this flag modules of the working directory would hide all further modules.
        self._command = [sys.executable, "-P", "-m", "quorate", "run", *options]
        self._command += ["--address", address, "--dies-with", str(os.getpid())]
        place = ["--", run.path] if run.module is None else ["-m", run.module, "--"]
        self._command += [*place, *run.arguments]
        self._folder = run.folder
        self._text, self._until, self._lock = b"", 0, threading.Lock()
        self._code: int | None = None
        self._since = time.time()
        self._process: subprocess.Popen[bytes] | None = None
        # A thread of its own: the process dies with the thread that started the process.
        threading.Thread(target=self._run, name="quorate-detached", daemon=True).start()

    def said(self, since: int) -> DetachedOutput:
        """Return the output after the first ``since`` bytes."""
        with self._lock:
            if since > self._until:  # bytes of an actor before this actor
                since = 0
            new = max(0, min(len(self._text), self._until - since))
            return DetachedOutput(self._text[len(self._text) - new :], self._until, self._code)

    def signal(self, number: int) -> None:
        """Send the process a signal, if the process lives."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def is_for(self, script: dict[str, Any], options: list[str]) -> bool:
        """Return whether the run is of this script with these options."""
        return self._asked == (script, options)

    def about(self) -> dict[str, Any]:
        """Return the state of the run for a person: start time, exit code and last line."""
        with self._lock:
            lines = self._text.decode(errors="replace").splitlines()
            return {"since": self._since, "code": self._code, "last": lines[-1:]}

    def inspected(self, words: list[str]) -> tuple[int, str]:
        """Return exit code and output of ``quorate inspect`` on this node."""
        done = subprocess.run(
            [sys.executable, "-P", "-m", "quorate", "inspect", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout

    def _run(self) -> None:
        # Ray blocks SIGINT in its processes; a new process inherits the mask of this thread.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        code = self._run_once()
        for number in range(1, MOST_STARTS):
            if code >= 0:
                break
            name = signal.Signals(-code).name
            self._say(
                f"quorate: the coordinator was killed ({name}) and starts again "
                f"({number} of {MOST_STARTS - 1})\n".encode()
            )
            code = self._run_once()
        self._code = code
        time.sleep(LAST_OUTPUT_S)
        with suppress(RayError, ValueError):
            ray.kill(ray.get_runtime_context().current_actor, no_restart=True)

    def _run_once(self) -> int:
        """Run the script once; return the exit code, -n after signal n. Blocks."""
        try:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd=self._folder,
                start_new_session=True,
            )
        except OSError as error:
            self._say(f"quorate: the run cannot be started on the head node: {error}\n".encode())
            return 2
        with self._process as process:
            assert process.stdout is not None
            while text := os.read(process.stdout.fileno(), 1 << 16):
                self._say(text)
            return process.wait()

    def _say(self, text: bytes) -> None:
        with self._lock:
            self._until += len(text)
            self._text = (self._text + text)[-KEPT_BYTES:]


class DetachedRun:
    """An onlooker's handle of a detached run."""

    def __init__(self, actor: Any, run_dir: str) -> None:
        self._actor, self._run_dir = actor, run_dir

    def ask(self, method: str, *arguments: object) -> Any:
        """Return the answer of the run's actor. Blocks while the actor is started again.

        Raises:
            RunError: the actor is gone.
        """
        until = time.monotonic() + ACTOR_ANSWER_S
        while True:
            try:
                return ray.get(
                    getattr(self._actor, method).remote(*arguments), timeout=ACTOR_ANSWER_S
                )
            except ActorUnavailableError:
                time.sleep(0.2)
                if time.monotonic() > until:
                    raise RunError(self._lost("does not answer")) from None
            except GetTimeoutError:
                raise RunError(self._lost(f"has not answered for {ACTOR_ANSWER_S:g} s")) from None
            except RayActorError as error:
                raise RunError(self._lost("is gone")) from error

    def end(self) -> None:
        """End the actor, after the end of the run."""
        with suppress(RayError, ValueError):
            ray.kill(self._actor, no_restart=True)

    def _lost(self, what: str) -> str:
        return (
            f"the detached run of {self._run_dir} {what}; look at its run directory, and run the "
            "same command again to go on"
        )


@contextmanager
def started(
    address: str, script: Script, folder: Path | None, options: list[str], run_dir: str
) -> Iterator[DetachedRun]:
    """Start a detached run, unless the run is there already, and look on within the block.

    Args:
        address: of the cluster.
        script: the script to run.
        folder: a folder with the script, sent to the cluster; None: head and nodes have the script
            at the same path.
        options: the words of ``quorate run`` but for address, folder and script.
        run_dir: the name of the run.

    Raises:
        UserError: there is no such cluster, or a different run has this name.
    """
    travels = {} if folder is None else {"runtime_env": {"working_dir": str(folder)}}
    fields = json.loads(json.dumps(vars(script)))
    with connected(address, namespace=NAMESPACE, log_to_driver=False, **travels):
        driver: Any = ray.remote(DetachedDriver)
        named = driver.options(
            name=run_dir,
            get_if_exists=True,
            lifetime="detached",
            max_restarts=-1,
            num_cpus=0,
            resources=HEAD,
        )
        run = DetachedRun(named.remote(fields, folder and str(folder), options), run_dir)
        if not run.ask("is_for", fields, options):
            raise UserError(
                f"a detached run of {run_dir} is at {address} with another script, arguments or "
                "options",
                fix="give those to look on, stop it first, or choose another run_dir",
            )
        yield run


@contextmanager
def running(address: str) -> Iterator[dict[str, DetachedRun]]:
    """Within the block, have the detached runs of a cluster, by run directory.

    Raises:
        UserError: there is no such cluster.
    """
    with connected(address, namespace=NAMESPACE, log_to_driver=False):
        found = {}
        for name in sorted(ray.util.list_named_actors()):
            with suppress(ValueError):  # the run has ended meanwhile
                found[name] = DetachedRun(ray.get_actor(name), name)
        yield found
