"""Checkpoints: ranks write them to a staging folder during training, the launcher uploads them.

    rank                           launcher                        store
    writes its part to the
    staging folder; `part`     ->  all parts are there: mark
                                   uploader: rows of metrics   ->  metrics/*.parquet
                                             files             ->  checkpoints/step-…/*.safetensors
                                             state, index      ->  …/state.json, checkpoints.json
    may take another       <-      `release`

A part is safe once its rank has reported it. A checkpoint is staged, and safe, once it is marked.

failure                      effect on checkpoints
rank lost before `part`      the unfinished one is dropped; the remaining group takes another
rank lost later; all lost    staged ones are uploaded, and training resumes from the newest
launcher killed              the next start on this machine uploads the staged ones
store unreachable            staged on disk, as many as the policy keeps, and uploaded later
host lost                    like its ranks; parts that it had sent are on the launcher's machine
shared memory or disk full   staged in the other one; if both are full, it is not saved
machine restarts             those synced to disk while the store was unreachable remain
lease lost to another launch the index no longer changes: later ones of this launch don't count

`saver` is the ranks' side, `coordinator` and `uploader` the launcher's, `staged` the folder between
them; `checkpoint_transfer` moves the parts of ranks on other hosts. `files`, `tensors` and `shards`
define the content of a checkpoint; `fence` decides which checkpoints count.
"""
