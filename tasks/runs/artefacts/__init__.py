"""What flows from step to step: one frozen class per file of the run folder.

`run_job` is the run's job and `run_status` its state; then, in the order of the steps:

    validate -> `validation`, with `data_schema` and `data_profile`
    recommend -> `recommendation`
    extract -> `Structure`, in `trainwright.estimator.structure`
    estimate -> `estimate`
    allocate -> `plan`
    search_lr -> `learning_rate_search`
    train -> `training_result`
    store -> `Manifest`, in `run_status`
    analyze -> `report_figures`
    export -> `export_report`

Every `artefact` has a `schema_version` and ignores unknown fields, so that each version reads the
files of the version before and after it. Names contain units.
"""
