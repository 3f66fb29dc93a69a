"""What was asked of a job while it runs, as the beats of its attempt bring it."""

from models import commands, jobs, probes
from models.leases import Beat
from worker.orders import Orders
from worker.station import Station
from worker.watching import Watching


class Asked:
    """The commands that are pending for one attempt."""

    def __init__(self, station: Station, job_id: str, watching: Watching, orders: Orders) -> None:
        self._station = station
        self._job = job_id
        self._watching = watching
        self._orders = orders
        self._beat: Beat | None = None
        self._num_commands = 0
        self.force = False
        """Whether the rank is to be signalled at once."""
        self.stops: list[str] = []
        """The pending commands that ask the job to stop."""

    @property
    def cancelled(self) -> bool:
        """Whether its owner asked the job to stop."""
        return self._beat is not None and self._beat.cancel_requested

    @property
    def pausing(self) -> bool:
        """Whether its owner asked the job to pause."""
        return self._beat is not None and self._beat.state == "pausing"

    def heard(self, beat: Beat) -> None:
        """Take what a write of this attempt brought back; read the commands where there are new."""
        self._beat = beat
        if beat.num_commands == self._num_commands:
            return
        with self._station.database.read() as tx:
            pending = jobs.commands_pending(tx, self._job)
            if any(command.body.get("do") == "probes" for command in pending):
                self._watching.wanted = probes.wanted(tx, self._job)
        self._orders.want(commands.orders(pending))
        stops = [command for command in pending if command.body.get("do") == "cancel"]
        self.stops = [command.id for command in stops]
        self.force = any(command.body.get("force") for command in stops)
        self._num_commands = beat.num_commands
