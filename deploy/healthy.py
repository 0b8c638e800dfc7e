"""Ends with 0 where this container's daemon answers on the port of its metrics: its event loop lives.

Any answer is one, also that of a page that wants a token. It is run every few seconds.
"""

import http.client
import sys

PORT = 9101
"""What the files beside this one give `--metrics` and `--dashboard`."""


def main(port: int = PORT) -> int:
    """The exit code of a health check."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/metrics")
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        print(f"nothing answers on port {port}: {error}")
        return 1
    finally:
        connection.close()
    return 0 if status < 500 else 1


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
