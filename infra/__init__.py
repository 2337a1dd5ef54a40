"""Infrastructure: the embedded stack, Horovod's build, the sandbox, processes.

`local` is the embedded stack (`s3_server`, `airflow`), `horovod` the build. `background_process`
and `process` start processes; `lock` and `ports` coordinate them.

Imports no other package of trainwright.
"""
