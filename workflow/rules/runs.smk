# One job per run: the framework trains once per role, and the run is committed to the store.
#
# A manifest's path holds the key of everything that can change the run's numbers, so its existence
# says all: inputs are ancient, and nothing else starts a training job a second time.

for role in jobs.made_here():

    rule:
        name:
            f"run_{role}"
        input:
            ancient(jobs.needs(role)),
        output:
            jobs.manifest(role),
        log:
            f"{LOGS}/{role}.log",
        priority: 10 if role == "target" else 0
        # rlprobe enters the run's own image: several nodes need srun from outside of it.
        container:
            lambda wildcards: None
        resources:
            **slurm(jobs.runs[role].resources),
            training=1,
        params:
            config=CONFIG,
            role=role,
            store=lambda wildcards: STORE,
        message:
            f"{role}: {ALIGNMENT.framework} on {jobs.runs[role].device}, log {LOGS}/{role}.log"
        shell:
            "rlprobe run --config {params.config} --role {params.role}"
            " --store {params.store} --log {log} > /dev/null"


rule collect:
    input:
        jobs.manifest("benchmark"),
