import socket

import pytest
import zmq

from tools.ports import LOOPBACK, LinkPorts, PortError, check_free, listen


def test_a_port_in_use_is_named() -> None:
    with listen(LOOPBACK, 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(PortError, match=f"cannot take HTTP port {port} on 127.0.0.1: it is in use"):
            listen(LOOPBACK, port)
        with pytest.raises(PortError, match=f"metrics port {port}"):
            check_free(LOOPBACK, [port])
    check_free(LOOPBACK, [port])


def test_an_address_that_is_not_ours_is_named() -> None:
    with pytest.raises(PortError, match=r"cannot take HTTP port 0 on 192\.0\.2\.1"):
        listen("192.0.2.1", 0)


def test_the_links_own_their_ports_and_the_scheduler_can_still_bind_them_again_and_again() -> None:
    with LinkPorts(0) as links:
        assert links.gateways != links.executors
        for _ in range(2):
            with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
                router.bind(f"tcp://{LOOPBACK}:{links.gateways}")
        with pytest.raises(PortError, match=f"cannot take link port {links.gateways} on 127.0.0.1: it is in use"):
            LinkPorts(links.gateways)


def test_links_that_another_program_listens_on_are_named() -> None:
    with socket.create_server((LOOPBACK, 0)) as other, pytest.raises(PortError, match="it is in use"):
        LinkPorts(other.getsockname()[1])


def test_closed_links_can_be_taken_again() -> None:
    with LinkPorts(0) as links:
        port = links.gateways
    with LinkPorts(port) as again:
        assert (again.gateways, again.executors) == (port, port + 1)


def test_systems_that_start_at_the_same_time_never_share_a_port() -> None:
    taken = [LinkPorts(0) for _ in range(40)]
    ports = [port for links in taken for port in (links.gateways, links.executors)]
    for links in taken:
        links.close()
    assert len(set(ports)) == 80


def test_the_second_link_port_in_use_was_said_of_the_first() -> None:
    with socket.create_server((LOOPBACK, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortError, match=f"cannot take link port {port} on"):
            LinkPorts(port - 1)
