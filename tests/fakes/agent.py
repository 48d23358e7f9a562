"""A guest agent that is a true ttrpc server on a socket pair, running small scripted processes instead of containers.

A process does what its `args` say: `exit N`, `echo TEXT`, `cat` (stdin to stdout, ends at EOF), `sleep` (until
signalled), `hold TEXT` (echoes, ends, but leaves both outputs open as a grandchild would), `yes N` (ends with N, a
grandchild prints on), `merged TEXT` (closes its stderr, lives, and ends with TEXT), `flood N` (N bytes of output).

As kata-agent it forgets a process when it answers WaitProcess, and the reads that wait when a process ends are at their
end, though a grandchild may hold the pipe. `remembers` makes it behave like our own agent, which keeps process and
output.
"""

import asyncio
import errno
import socket
from collections.abc import Callable
from signal import SIGWINCH

from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import Message

from protos.agent import agent_pb2 as pb
from protos.agent import health_pb2, types_pb2
from pyshim.agent.client import JOINS_BY_NAME, KEEPS_OUTPUT, MEASURES_ALL, SETS_UNIFIED
from pyshim.ttrpc import Code, Server, TtrpcError
from pyshim.ttrpc.session import CallContext, UnaryHandler


class FakeProcess:
    def __init__(self, args: list[str], *, ends_reads: bool = True) -> None:
        self.args = args
        self._ends_reads = ends_reads
        self.output = bytearray()
        self.output_ended = self.stderr_ended = False
        self.prints_on = False
        """A grandchild gives every read some output."""
        self.input = bytearray()
        self.input_ended = False
        self.changed = asyncio.Condition()
        self.exit: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.signals: list[int] = []
        self.exits = 0

    async def read(self, size: int) -> bytes:
        """Empty at the end, and with `ends_reads` when the process ends during this call, though the output is open."""
        if self.prints_on and not self.output_ended:
            await asyncio.sleep(0.01)
            return b"y\n"
        async with self.changed:
            exits = self.exits
            await self.changed.wait_for(lambda: self.output or self.output_ended or self._is_read_over(exits))
            data = bytes(self.output[:size])
            del self.output[:size]
            return data

    async def read_errors(self) -> bytes:
        async with self.changed:
            exits = self.exits
            await self.changed.wait_for(lambda: self.stderr_ended or self._is_read_over(exits))
            return b""

    def _is_read_over(self, exits: int) -> bool:
        return self._ends_reads and self.exits != exits

    async def end_output(self) -> None:
        async with self.changed:
            self.output.clear()
            self.output_ended = self.stderr_ended = True
            self.changed.notify_all()

    async def run(self) -> None:
        match self.args:
            case ["exit", status]:
                await self.end(int(status))
            case ["echo", text]:
                self.output += text.encode()
                await self.end(0)
            case ["flood", count]:
                self.output += b"x" * int(count)
                await self.end(0)
            case ["hold", text]:
                async with self.changed:
                    self.output += text.encode()
                    self.changed.notify_all()
                await asyncio.sleep(0.01)
                await self.end(0, close=False)
            case ["yes", status]:
                self.prints_on = True
                async with self.changed:
                    self.output += b"y\n"
                    self.changed.notify_all()
                await asyncio.sleep(0.05)
                await self.end(int(status), close=False)
            case ["merged", text]:
                async with self.changed:
                    self.stderr_ended = True
                    self.changed.notify_all()
                await asyncio.sleep(20)
                for byte in text.encode():
                    self.output.append(byte)
                await self.end(0)
            case ["cat"]:
                await self._copy()
            case ["/relay", "9"]:  # port-forward's program: no process listens on this port
                await self.end(errno.ECONNREFUSED)
            case ["/relay", "13"]:  # a listener that never says anything
                pass
            case ["/relay", _]:
                await self._copy()
            case ["/relay", "resolve", _]:  # the test says what it prints, and reads what it is given
                pass

    async def _copy(self) -> None:
        async with self.changed:
            while True:
                await self.changed.wait_for(lambda: self.input or self.input_ended)
                if not self.input:
                    break
                self.output += self.input
                self.input.clear()
                self.changed.notify_all()
        await self.end(0)

    async def end(self, status: int, *, close: bool = True) -> None:
        async with self.changed:
            self.output_ended = self.output_ended or close
            self.stderr_ended = self.stderr_ended or close
            self.exits += 1
            self.changed.notify_all()
        if not self.exit.done():
            self.exit.set_result(status)


class FakeAgent:
    """`calls` is every method in order; `failures` maps a method to its error; `hung` methods never answer.

    `held` methods wait for their event before they do anything, `late` ones do their work and then hold the reply.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.contexts: dict[str, str | None] = {}
        """By method, the `traceparent` of its last call."""
        self.failures: dict[str, tuple[int, str]] = {}
        self.hung: set[str] = set()
        self.held: dict[str, asyncio.Event] = {}
        self.late: dict[str, asyncio.Event] = {}
        self.edit_container: Callable[[pb.CreateContainerRequest], None] = lambda request: None
        """A proxy's edit of CreateContainer before this agent."""
        self.serving = health_pb2.HealthCheckResponse.SERVING
        """The answer to Check."""
        self.containers: dict[str, pb.CreateContainerRequest] = {}
        self.processes: dict[tuple[str, str], FakeProcess] = {}
        self.ended: dict[tuple[str, str], FakeProcess] = {}
        """Processes it has forgotten."""
        self.remembers = False
        self.execs: dict[tuple[str, str], pb.ExecProcessRequest] = {}
        self.sizes: list[tuple[str, str, int, int]] = []
        self.takes: int | None = None
        """The count in WriteStdin's reply, where it lies."""
        self.sandbox: pb.CreateSandboxRequest | None = None
        self.policy = ""
        self.copied: list[pb.CopyFileRequest] = []
        self.metrics = '# TYPE kata_guest_load gauge\nkata_guest_load{item="load1"} 0.5\n'
        """The answer to GetMetrics."""
        self.termination_messages: dict[str, str] = {}
        """By container."""
        self.iptables: dict[bool, bytes] = {}
        """By whether they are for IPv6."""
        self.pids = 3
        self.volume_sizes: list[tuple[str, int]] = []
        self.updates: list[pb.UpdateContainerRequest] = []
        self.tmpfs_updates: list[pb.Storage] = []
        """Of every UpdateEphemeralMounts."""
        self.memory_block_bytes = 128 << 20
        self.onlined: list[tuple[int, bool]] = []
        """(CPUs, CPUs only) of every OnlineCPUMem."""
        self.seeds: list[bytes] = []
        self.times_ns: list[int] = []
        """Of every SetGuestDateTime."""
        self.swaps: list[tuple[int, ...]] = []
        """The PCI path of every AddSwap."""
        self.interfaces: list[types_pb2.Interface] = []
        self.routes: list[tuple[types_pb2.Route, ...]] = []
        """Each UpdateRoutes, whole."""
        self.neighbours: list[types_pb2.ARPNeighbor] = []
        self.oom: asyncio.Queue[str] = asyncio.Queue()
        self._running: set[asyncio.Task[None]] = set()
        self._served: list[socket.socket] = []
        names = [name.removeprefix("_on_") for name in dir(self) if name.startswith("_on_")]
        agent = {name: UnaryHandler(self._handler(name), cancel_on_timeout=True) for name in names if name != "Check"}
        self.server = Server(
            services={
                "grpc.AgentService": agent,
                "grpc.Health": {"Check": UnaryHandler(self._handler("Check"), cancel_on_timeout=True)},
            }
        )

    def connection(self) -> socket.socket:
        """A new connected socket whose other end this agent serves."""
        ours, theirs = socket.socketpair()
        self._served.append(theirs)
        task = asyncio.get_running_loop().create_task(self.server.serve_connection(theirs), name="fake-agent")
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        ours.setblocking(False)
        return ours

    async def close(self) -> None:
        for process in (*self.processes.values(), *self.ended.values()):
            process.exit.cancel()
        await self.server.shutdown(0)
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        for sock in self._served:  # one whose task was ended before it ran
            sock.close()

    def _handler(self, name: str):
        answer = f"_on_{name}"  # one string: the interpreter remembers each it looked up
        assert hasattr(self, answer), name

        async def handle(payload: bytes, context: CallContext) -> bytes:
            self.calls.append(name)
            self.contexts[name] = dict(context.metadata).get("traceparent")
            if name in self.hung:
                await asyncio.get_running_loop().create_future()
            if name in self.held:
                await self.held[name].wait()
            if name in self.failures:
                raise TtrpcError(*self.failures[name])
            reply: Message = await getattr(self, answer)(payload)
            if name in self.late:
                await self.late[name].wait()
            return reply.SerializeToString()

        return handle

    def _process(self, container_id: str, exec_id: str) -> FakeProcess:
        process = self.processes.get((container_id, exec_id or container_id))
        if process is None:
            raise TtrpcError(Code.NOT_FOUND, f"no process {container_id}/{exec_id}")
        return process

    def _run(self, process: FakeProcess) -> None:
        task = asyncio.get_running_loop().create_task(process.run(), name="fake-process")
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _on_Check(self, payload: bytes) -> Message:
        return health_pb2.HealthCheckResponse(status=self.serving)

    async def _on_CreateSandbox(self, payload: bytes) -> Message:
        self.sandbox = pb.CreateSandboxRequest.FromString(payload)
        return Empty()

    async def _on_SetPolicy(self, payload: bytes) -> Message:
        self.policy = pb.SetPolicyRequest.FromString(payload).policy
        return Empty()

    async def _on_CopyFile(self, payload: bytes) -> Message:
        self.copied.append(pb.CopyFileRequest.FromString(payload))
        return Empty()

    async def _on_DestroySandbox(self, payload: bytes) -> Message:
        return Empty()

    async def _on_UpdateInterface(self, payload: bytes) -> Message:
        self.interfaces.append(pb.UpdateInterfaceRequest.FromString(payload).interface)
        return self.interfaces[-1]

    async def _on_UpdateRoutes(self, payload: bytes) -> Message:
        routes = pb.UpdateRoutesRequest.FromString(payload).routes
        self.routes.append(tuple(routes.Routes))
        return routes

    async def _on_AddARPNeighbors(self, payload: bytes) -> Message:
        self.neighbours += pb.AddARPNeighborsRequest.FromString(payload).neighbors.ARPNeighbors
        return Empty()

    async def _on_CreateContainer(self, payload: bytes) -> Message:
        request = pb.CreateContainerRequest.FromString(payload)
        self.edit_container(request)
        self.containers[request.container_id] = request
        self.processes[request.container_id, request.container_id] = FakeProcess(
            list(request.OCI.Process.Args), ends_reads=not self.remembers
        )
        return Empty()

    async def _on_StartContainer(self, payload: bytes) -> Message:
        request = pb.StartContainerRequest.FromString(payload)
        self._run(self._process(request.container_id, ""))
        return Empty()

    async def _on_RemoveContainer(self, payload: bytes) -> Message:
        container_id = pb.RemoveContainerRequest.FromString(payload).container_id
        if self.containers.pop(container_id, None) is None:
            raise TtrpcError(Code.NOT_FOUND, f"no container {container_id}")
        for key in [key for key in self.processes if key[0] == container_id]:
            await self.processes.pop(key).end(137)
        return Empty()

    async def _on_RemoveStaleVirtiofsShareMounts(self, payload: bytes) -> Message:
        return Empty()

    async def _on_ExecProcess(self, payload: bytes) -> Message:
        request = pb.ExecProcessRequest.FromString(payload)
        process = FakeProcess(list(request.process.Args), ends_reads=not self.remembers)
        self.execs[request.container_id, request.exec_id] = request
        self.processes[request.container_id, request.exec_id] = process
        self._run(process)
        return Empty()

    async def _on_SignalProcess(self, payload: bytes) -> Message:
        request = pb.SignalProcessRequest.FromString(payload)
        process = self._process(request.container_id, request.exec_id)
        if process.exit.done():  # kata-agent takes the kernel's ESRCH for success
            return Empty()
        process.signals.append(request.signal)
        if request.signal != SIGWINCH:  # the kernel ignores it unless the process has a handler
            await process.end(128 + request.signal)
        return Empty()

    async def _on_WaitProcess(self, payload: bytes) -> Message:
        request = pb.WaitProcessRequest.FromString(payload)
        process = self._process(request.container_id, request.exec_id)
        status = await asyncio.shield(process.exit)
        if not self.remembers:
            self.processes.pop((request.container_id, request.exec_id or request.container_id), None)
            self.ended[request.container_id, request.exec_id or request.container_id] = process
            await process.end(status)
        return pb.WaitProcessResponse(status=status)

    async def _on_ReadStdout(self, payload: bytes) -> Message:
        request = pb.ReadStreamRequest.FromString(payload)
        process = self._process(request.container_id, request.exec_id)
        if not request.len:
            assert self.remembers, "kata-agent refuses a read of no bytes"
            await process.end_output()
        return pb.ReadStreamResponse(data=await process.read(request.len))

    async def _on_ReadStderr(self, payload: bytes) -> Message:
        request = pb.ReadStreamRequest.FromString(payload)
        return pb.ReadStreamResponse(data=await self._process(request.container_id, request.exec_id).read_errors())

    async def _on_WriteStdin(self, payload: bytes) -> Message:
        request = pb.WriteStreamRequest.FromString(payload)
        process = self._process(request.container_id, request.exec_id)
        async with process.changed:
            process.input += request.data
            process.changed.notify_all()
        return pb.WriteStreamResponse(len=len(request.data) if self.takes is None else self.takes)

    async def _on_CloseStdin(self, payload: bytes) -> Message:
        request = pb.CloseStdinRequest.FromString(payload)
        process = self._process(request.container_id, request.exec_id)
        async with process.changed:
            process.input_ended = True
            process.changed.notify_all()
        return Empty()

    async def _on_TtyWinResize(self, payload: bytes) -> Message:
        request = pb.TtyWinResizeRequest.FromString(payload)
        self.sizes.append((request.container_id, request.exec_id, request.row, request.column))
        return Empty()

    async def _on_PauseContainer(self, payload: bytes) -> Message:
        return Empty()

    async def _on_ResumeContainer(self, payload: bytes) -> Message:
        return Empty()

    async def _on_UpdateContainer(self, payload: bytes) -> Message:
        self.updates.append(pb.UpdateContainerRequest.FromString(payload))
        return Empty()

    async def _on_GetGuestDetails(self, payload: bytes) -> Message:
        ours = [KEEPS_OUTPUT, JOINS_BY_NAME, SETS_UNIFIED, MEASURES_ALL]
        details = pb.AgentDetails(extra_features=ours if self.remembers else [])
        return pb.GuestDetailsResponse(mem_block_size_bytes=self.memory_block_bytes, agent_details=details)

    async def _on_OnlineCPUMem(self, payload: bytes) -> Message:
        request = pb.OnlineCPUMemRequest.FromString(payload)
        self.onlined.append((request.nb_cpus, request.cpu_only))
        return Empty()

    async def _on_ReseedRandomDev(self, payload: bytes) -> Message:
        self.seeds.append(pb.ReseedRandomDevRequest.FromString(payload).data)
        return Empty()

    async def _on_SetGuestDateTime(self, payload: bytes) -> Message:
        request = pb.SetGuestDateTimeRequest.FromString(payload)
        self.times_ns.append(request.Sec * 10**9 + request.Usec * 1000)
        return Empty()

    async def _on_AddSwap(self, payload: bytes) -> Message:
        self.swaps.append(tuple(pb.AddSwapRequest.FromString(payload).PCIPath))
        return Empty()

    async def _on_GetMetrics(self, payload: bytes) -> Message:
        return pb.Metrics(metrics=self.metrics)

    async def _on_GetIPTables(self, payload: bytes) -> Message:
        return pb.GetIPTablesResponse(data=self.iptables.get(pb.GetIPTablesRequest.FromString(payload).is_ipv6, b""))

    async def _on_SetIPTables(self, payload: bytes) -> Message:
        request = pb.SetIPTablesRequest.FromString(payload)
        self.iptables[request.is_ipv6] = request.data
        return pb.SetIPTablesResponse()

    async def _on_GetDiagnosticData(self, payload: bytes) -> Message:
        request = pb.GetDiagnosticDataRequest.FromString(payload)
        assert request.log_type == "termination_log"
        return pb.GetDiagnosticDataResponse(data=self.termination_messages[request.container_id])

    async def _on_GetVolumeStats(self, payload: bytes) -> Message:
        request = pb.VolumeStatsRequest.FromString(payload)
        usage = pb.VolumeUsage(total=100, available=60, used=40, unit=1)
        return pb.VolumeStatsResponse(
            usage=[usage], volume_condition=pb.VolumeCondition(message=request.volume_guest_path)
        )

    async def _on_UpdateEphemeralMounts(self, payload: bytes) -> Message:
        self.tmpfs_updates += pb.UpdateEphemeralMountsRequest.FromString(payload).storages
        return Empty()

    async def _on_ResizeVolume(self, payload: bytes) -> Message:
        request = pb.ResizeVolumeRequest.FromString(payload)
        self.volume_sizes.append((request.volume_guest_path, request.size))
        return Empty()

    async def _on_StatsContainer(self, payload: bytes) -> Message:
        reply = pb.StatsContainerResponse()
        reply.cgroup_stats.cpu_stats.cpu_usage.total_usage = 42
        reply.cgroup_stats.memory_stats.usage.usage = 4096
        reply.cgroup_stats.pids_stats.current = self.pids
        return reply

    async def _on_StatsContainers(self, payload: bytes) -> Message:
        one = await self._on_StatsContainer(payload)
        return pb.StatsContainersResponse(containers=dict.fromkeys(self.containers, one.cgroup_stats))

    async def _on_GetOOMEvent(self, payload: bytes) -> Message:
        """As kata-agent: no event for a container whose id is the sandbox's."""
        while (container_id := await self.oom.get()) == (self.sandbox.sandbox_id if self.sandbox else ""):
            pass
        return pb.OOMEvent(container_id=container_id)
