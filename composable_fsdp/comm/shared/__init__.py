"""The communicator of ranks on one host: messages over Unix sockets, data through shared memory. Linux only."""
