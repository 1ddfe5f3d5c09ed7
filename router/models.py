"""Which models a router serves: the text side it has loaded, joined with the cards of the live workers."""

from pdserve.errors import ModelNotFound, Unavailable
from pdserve.membership import WorkerInfo
from pdserve.v1 import cluster_pb2
from router.directory import Directory
from router.peers import Peer
from router.pipeline import Pipeline
from router.tokenizer import TextModel
from router.validation import ServedModel
from router.waiting_room import WaitingRoom


class Models:
    """One model, by its name or by an empty one."""

    def __init__(self, name: str, text: TextModel, directory: Directory) -> None:
        self._name = name
        self._text = text
        self._directory = directory
        self._last: ServedModel | None = None  # stands while workers come back: requests wait for them

    def find(self, name: str) -> ServedModel:
        """Raises ModelNotFound; Unavailable when no worker serves the model yet."""
        if name not in ("", self._name):
            raise ModelNotFound(f"model: {name!r} is not served here; use {self._name!r} or leave it empty")
        peers: list[Peer] = [*self._directory.prefills, *self._directory.decodes]
        if self._directory.is_serving:
            card = peers[0].info.card
            num_pages = min(peer.beat.pages.total for peer in peers)
            self._last = ServedModel(card, self._text, num_pages * card.kv_layout.page_tokens)
        if self._last is None:
            raise Unavailable(f"no worker serves {self._name!r} yet")
        return self._last

    def all(self) -> list[ServedModel]:
        """All models that workers serve at the moment."""
        try:
            return [self.find(self._name)]
        except Unavailable:
            return []


class Status:
    """The cluster as this router sees it."""

    def __init__(self, directory: Directory, room: WaitingRoom, pipeline: Pipeline) -> None:
        self._directory = directory
        self._room = room
        self._pipeline = pipeline

    def status(self) -> cluster_pb2.GetStatusResponse:
        """Live workers by id, who is silent, and the requests here."""
        return cluster_pb2.GetStatusResponse(
            workers=[self._worker(peer) for peer in self._peers()],
            queued_requests=len(self._room),
            running_requests=self._pipeline.num_running,
            silent=sorted(info.id for info in self._directory.silent),
        )

    def members(self) -> tuple[WorkerInfo, ...]:
        """All workers that have not left, whether alive or not."""
        return self._directory.members

    def held(self) -> list[cluster_pb2.HeldTicket]:
        """The tickets of this router, on all decode workers."""
        tickets = [held for peer in self._directory.decodes for held in peer.client.held_tickets()]
        return [
            cluster_pb2.HeldTicket(
                worker=ticket.worker, incarnation=ticket.incarnation, counter=ticket.counter, label=label
            )
            for ticket, label in tickets
        ]

    @property
    def router(self) -> str:
        """This router's name in the ledgers of workers."""
        return self._directory.router

    def _peers(self) -> list[Peer]:
        peers: list[Peer] = [*self._directory.prefills, *self._directory.decodes]
        return sorted(peers, key=lambda peer: peer.info.id)

    def _worker(self, peer: Peer) -> cluster_pb2.WorkerStatus:
        info, beat = peer.info, peer.beat
        linked = [decode.info.id for decode in self._directory.decodes if decode.info.incarnation in beat.linked]
        return cluster_pb2.WorkerStatus(
            id=info.id,
            role=info.role,
            pid=info.pid,
            incarnation=info.incarnation,
            address=info.address,
            model=info.card.name,
            exact=info.card.exact,
            load=beat.load,
            pages=beat.pages,
            linked=sorted(linked),
            draining=beat.draining,
            work=beat.work,
            recent=peer.recent.work(),
            limits=beat.limits if beat.HasField("limits") else None,
        )
