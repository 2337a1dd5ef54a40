"""Checkpoints: taken while training goes on, and brought to the store by the launcher alone.

    rank                           launcher                        store
    writes its part to the
    staging folder; `part`     ->  all parts are there: mark
                                   uploader: rows of metrics   ->  metrics/*.parquet
                                             files             ->  checkpoints/step-…/*.safetensors
                                             state, index      ->  …/state.json, checkpoints.json
    may take another       <-      `release`

A part is safe when its rank has reported it, a checkpoint when it is marked: it is staged then.

what ends                    what becomes of checkpoints
a rank, before its `part`    the one under way is dropped; the group that goes on takes another
a rank, after it; all ranks  what is staged reaches the store, and training goes on from there
the launcher                 the next start on this machine brings what is staged to the store
the store                    they are staged on disk, as many as the policy keeps, and follow later
a host                       as its ranks; parts that it had sent are on the launcher's machine
shared memory or disk, full  they are staged in the other; if both are, that one is not kept
the machine                  what was synced to its disk while the store was away counts
the lease, to another        the index no longer changes: nothing of this launch counts (`fence`)

`saver` is the ranks' side, `coordinator` and `uploader` the launcher's, `staged` the folder between
them; `files`, `tensors` and `shards` say what a checkpoint holds, `fence` which of them count.
"""
