"""The coordinator's two gRPC servers: where they are found, and the files that their connections take."""

from contextlib import AsyncExitStack
from dataclasses import dataclass

import grpc.aio

from coordinator.config import CoordinatorConfig, Home
from coordinator.connections import Connections, Limits, most_connections
from coordinator.relay.one_port import HERE, OnePort
from protocol.service.limits import allow_open_files, require_open_files, require_processes
from protocol.trust.pki import server_name
from protocol.wire.server import (
    CONTROL_OPTIONS,
    ENROLMENT_OPTIONS,
    ReadableMessages,
    WholeMessages,
    bind_control,
    bind_enrolment,
    with_most,
)

OWN_OPEN_FILES = 96
DASHBOARD_OPEN_FILES = 128
OPEN_FILES_PER_NODE = 2
"""Sockets, the database and what gRPC takes for itself; the calls that pages answer at once and who watches;
a node's connection, and the one after a break before the old one is given up."""

PROCESSES = 16
"""Threads on two cores: of gRPC, the database and the page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """Both servers, which do not serve yet, and where they are found."""

    control: grpc.aio.Server
    enrolment: grpc.aio.Server
    connections: Connections
    control_port: int  # as others are told
    enrolment_port: int
    here: str  # the host by which this machine finds them
    local: dict[int, int]  # for each port that others are told, the one on this machine


def bind(
    home: Home, config: CoordinatorConfig, opened: AsyncExitStack, *, is_carried: bool
) -> Ports:
    """Listens for members and for who joins; `is_carried` where they come through a relay."""
    most_members, most_joining = most_connections(
        _files_for_connections(config, is_carried=is_carried)
    )
    own_host = HERE if config.has_one_port else config.host
    control = grpc.aio.server(
        interceptors=[WholeMessages()], options=with_most(CONTROL_OPTIONS, most_members)
    )
    control_port = bind_control(
        control,
        own_host,
        0 if config.has_one_port else config.control_port,
        issuers_pem=home.issuer.certificate_pem + home.authority_pem,
        certificate_pem=home.server_pem,
        key_pem=home.server_key_pem,
    )
    enrolment = grpc.aio.server(
        interceptors=[ReadableMessages()], options=with_most(ENROLMENT_OPTIONS, most_joining)
    )
    enrolment_port = bind_enrolment(
        enrolment,
        own_host,
        0 if config.has_one_port else config.enrolment_port,
        certificate_pem=home.server_pem,
        key_pem=home.server_key_pem,
    )
    watched = {control_port: most_members, enrolment_port: most_joining}
    here, local = config.host, {port: port for port in watched}
    one_port: OnePort | None = None
    if config.has_one_port:
        # Behind a relay its number is the relay's alone: nobody dials it here, and 443 is for root on most
        # machines.
        here = HERE if is_carried else config.host
        one_port = OnePort(
            here,
            0 if is_carried else config.control_port,
            control_name=server_name(home.issuer.swarm_id),
            control_port=control_port,
            enrolment_port=enrolment_port,
            most=most_members + most_joining,
            most_per_address=config.connections_per_address,
            spares_own=is_carried,
        )
        opened.push_async_callback(one_port.close)
        control_port = enrolment_port = config.control_port
        local = {control_port: one_port.port}
    connections = Connections(
        watched,
        Limits(per_address=config.connections_per_address),
        spares_own=is_carried or config.has_one_port,
        sources=None if one_port is None else one_port.sources,
    )
    return Ports(
        control=control,
        enrolment=enrolment,
        connections=connections,
        control_port=control_port,
        enrolment_port=enrolment_port,
        here=here,
        local=local,
    )


def _own_open_files(config: CoordinatorConfig) -> int:
    return OWN_OPEN_FILES + (DASHBOARD_OPEN_FILES if config.dashboard else 0)


def _files_per_connection(config: CoordinatorConfig, *, is_carried: bool) -> int:
    """Through a relay, or one port for all, two more each: both ends of the one to the port behind."""
    return 1 + 2 * is_carried + 2 * config.has_one_port


def _files_for_connections(config: CoordinatorConfig, *, is_carried: bool) -> int:
    left = allow_open_files() - _own_open_files(config)
    return max(0, left) // _files_per_connection(config, is_carried=is_carried)


def require_room_for(config: CoordinatorConfig, *, min_nodes: int, is_carried: bool) -> None:
    """Raises SystemRefusedError where threads are too few, or a run's nodes could not all be connected."""
    require_processes(PROCESSES, of="the coordinator")
    for_nodes = OPEN_FILES_PER_NODE * _files_per_connection(config, is_carried=is_carried)
    require_open_files(_own_open_files(config) + for_nodes * min_nodes, of="the coordinator")
