"""A record of what the library does, with which a change that must preserve behaviour is compared.

    python -m tests.goldens compare --quick     # the fixed tenth of the cases that is recorded here, 90 s on two cores
    python -m tests.goldens compare             # everything, about ten minutes
    python -m tests.goldens show 17 --transport sockets
    python -m tests.goldens show 17 --transport sockets --against main   # its difference from another commit
    python -m tests.goldens record              # after a change of behaviour that is meant
    python -m tests.goldens draw                # programs anew, after a change of the fuzzer

The repository has the record of a tenth. Before a large change, run ``record`` on the commit that it starts from, in a
worktree, and compare with that.

A *case* is a program of the fuzzer, named by its number, or one call of ``run_ranks`` in one of the chosen tests,
named as pytest names the test. For each case and transport ``records.txt`` has one line: hashes of the events of the
recorder, of the labels of collectives and of the results, over all ranks, and for each kind of event its number and its
bytes.

- Events: operation, group, bytes, bytes without codecs, and the name of the stream; of a collective its kind, its
  bytes and its ranks instead of the group.
- Labels: the text that a collective has in error messages. It has a hash of its own, so that a change of wording
  changes this hash alone.
- Results: the bits of losses, gradients and parameters. For programs, everything in ``tests.helpers.fuzz.run.Run``. For
  tests, each tensor on which ``backward`` is called, and gradients and parameters at each optimizer step, of references
  too.

Left out: host times; the names of process groups, which count the groups of the process; the numbers of collectives and
of connections, which go on from one case to the next. The order of events of different threads is not recorded: each
thread has a list of its own. Whatever else differs between two recordings of the same commit, ``record`` finds, as it
records everything twice; such a hash is written as ``-`` and compared with nothing. A case that fails is written
without hashes; a batch of programs in which one fails is run again in halves, as ranks may be out of step after it.

Bits of results hold for one release of torch and for processors on which MKL has the same results as here;
``observe.PORTABLE`` has it and ATen use no instructions that only some processors have.
"""
