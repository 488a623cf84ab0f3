"""What code of a tenant finds on the machine's loopback addresses, and what it gets to listen
at."""

import itertools
import socket

import pilotlight

app = pilotlight.App("local-ports")


@app.function(memory="256MiB", scaledown_window=600)
def listen(port: int) -> list[str]:
    """Every loopback and wildcard address of `port` that this code gets to listen at, whatever
    options it sets."""
    done = []
    hosts = ("127.0.0.1", "0.0.0.0", "::1", "::", "::ffff:127.0.0.1")
    for host, reuse, share, only in itertools.product(hosts, (0, 1), (0, 1), (0, 1)):
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
            try:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, share)
                if ":" in host:
                    listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, only)
                listener.bind((host, port))
                listener.listen()
                done.append(f"{host} {reuse} {share} {only}")
            except OSError:
                continue
    return done


@app.function(memory="256MiB", scaledown_window=600)
def ask(ports: list[int]) -> dict[str, str]:
    """Port -> what an HTTP server there answers to a scrape of metrics; the error's name where
    there is none."""
    said = {}
    for port in ports:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=5) as caller:
                caller.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                said[str(port)] = caller.recv(65536).decode(errors="replace")
        except OSError as e:
            said[str(port)] = type(e).__name__
    return said
