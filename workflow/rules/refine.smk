# After a divergence: tensors and operators of the suspects only. Where a part fails, the verdict
# stands without it and says so.


localrules:
    refine,
    suspects,


# Only the diagnosis tells what is suspect, hence which runs there are: none where nothing is.
checkpoint suspects:
    input:
        f"{RESULTS}/diagnosis.json",
    output:
        f"{RESULTS}/refine/suspects.json",
    log:
        f"{LOGS}/refine/suspects.log",
    # On the scheduling host, like the plan: it reads the alignment.
    container:
        lambda wildcards: None
    params:
        config=CONFIG,
    message:
        "suspects: {output}"
    shell:
        "rlprobe refine --config {params.config} --part suspects > {log} 2>&1"


for side in ("benchmark", "target"):

    rule:
        name:
            f"refine_{side}"
        input:
            f"{RESULTS}/refine/suspects.json",
        output:
            touch(f"{RESULTS}/refine/.{side}"),
        log:
            f"{LOGS}/refine/{side}.log",
        container:
            lambda wildcards: None
        resources:
            **slurm(jobs.runs[side].resources),
            training=1,
        params:
            config=CONFIG,
            side=side,
        message:
            f"tensors of the suspects on the {side}'s device, log {LOGS}/refine/{side}.log"
        shell:
            "rlprobe refine --config {params.config} --part {params.side} --log {log} --no-fail"


# The target once more, the benchmark's outputs in the suspect's place.
rule refine_substituted:
    input:
        [f"{RESULTS}/refine/.{side}" for side in ("benchmark", "target")],
    output:
        touch(f"{RESULTS}/refine/.substituted"),
    log:
        f"{LOGS}/refine/substituted.log",
    container:
        lambda wildcards: None
    resources:
        **slurm(jobs.runs["target"].resources),
        training=1,
    params:
        config=CONFIG,
    message:
        f"the benchmark's outputs in the suspect's place, log {LOGS}/refine/substituted.log"
    shell:
        "rlprobe refine --config {params.config} --part substituted --log {log} --no-fail"


rule refined:
    input:
        suspects=f"{RESULTS}/refine/suspects.json",
        sides=[
            f"{RESULTS}/refine/.{side}"
            for side in ("benchmark", "target", "substituted")
        ],
    output:
        f"{RESULTS}/refine/diagnosis.json",
    log:
        f"{LOGS}/refine/refined.log",
    container:
        lambda wildcards: None
    resources:
        **slurm(ALIGNMENT.analysis.resources),
    params:
        config=CONFIG,
    message:
        "what the tensors say: {output}"
    shell:
        "rlprobe refine --config {params.config} --part verdict --no-fail > {log} 2>&1"


# The sharper verdict, or the file that says why there is none.
rule refine:
    input:
        lambda wildcards: jobs.refinement(checkpoints.suspects.get().output[0]),
