"""Records the library's behaviour, and compares the current behaviour with the record.

    python -m tests.goldens compare --quick     # the fixed tenth of the cases that is recorded here, 90 s on two cores
    python -m tests.goldens compare             # all cases, about ten minutes
    python -m tests.goldens show 17 --transport sockets
    python -m tests.goldens show 17 --transport sockets --against main   # compare one case with another commit
    python -m tests.goldens dry --quick         # compare each pass of the programs with its dry run
    python -m tests.goldens record              # after an intended change of behaviour
    python -m tests.goldens draw                # draw new programs, after a change of the fuzzer

The repository has the record of a tenth of the cases. Before a large change, run ``record`` in a worktree of the commit
on which the change is based, and compare with that record.

A *case* is a program of the fuzzer, named by its number, or one call of ``run_ranks`` in one of the chosen tests,
named by the id of the test. ``records.txt`` has one line for each case and transport. The line has hashes over all
ranks of recorded events, of labels of collectives and of results, and the number and the bytes of each kind of event.

- Events: operation, group, bytes, bytes without codecs, and the name of the stream. A collective has its kind, its
  bytes and its ranks instead of the group.
- Labels: the text that a collective has in error messages. Labels have a separate hash, so a change of wording changes
  only this hash.
- Results: the bits of losses, gradients and parameters. For programs, these are all values of
  ``tests.helpers.fuzz.run.Run``. For tests, these are each tensor on which ``backward`` is called, and gradients and
  parameters at each optimizer step, also those of references.

Not recorded are host times, the names of process groups, and the numbers of collectives and connections, because they
depend on earlier cases. The order of events of different threads is not recorded either: each thread has its own list.
``record`` runs all cases twice. A hash that differs between the two runs is written as ``-`` and is never compared. A
case that fails is written without hashes. If a program in a batch fails, each half of the batch runs again, because the
ranks may have diverged.

The bits of results are valid for one release of torch, and for processors on which MKL gives the same results.
``observe.PORTABLE`` disables instructions of MKL and ATen that only some processors have.
"""
