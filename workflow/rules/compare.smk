# Differences: ours for every pair and stage, msprobe's own table beside them.


wildcard_constraints:
    pair="|".join(jobs.pairs),
    stage="[a-z_]+",
    digest="[0-9a-f]{16}",


# Named after the runs compared: other runs make the comparison anew, with or without Snakemake's
# record of what it was made from.
rule sides:
    output:
        f"{RESULTS}/compare/{{pair}}/.of-{{digest}}",
    log:
        f"{LOGS}/compare/{{pair}}/sides-{{digest}}.log",
    container:
        lambda wildcards: None
    message:
        "which runs {wildcards.pair} compares: {wildcards.digest}"
    shell:
        "rlprobe config sides {output} > {log} 2>&1"


rule compare:
    input:
        manifests=lambda wildcards: jobs.manifests(wildcards.pair),
        mark=lambda wildcards: jobs.pair_mark(wildcards.pair),
    output:
        records=f"{RESULTS}/compare/{{pair}}/{{stage}}/records.parquet",
        summary=f"{RESULTS}/compare/{{pair}}/{{stage}}/summary.json",
    log:
        f"{LOGS}/compare/{{pair}}/{{stage}}.log",
    resources:
        **slurm(ALIGNMENT.analysis.resources),
    params:
        sides=lambda wildcards, input: [
            Path(manifest).parent for manifest in input.manifests
        ],
        out=lambda wildcards, output: Path(output.summary).parents[1],
        coverage=ALIGNMENT.coverage,
        rlprobe=jobs.entered(CONFIG),
    message:
        "compare {wildcards.pair}: {wildcards.stage}"
    shell:
        "{params.rlprobe} compare {params.sides} -o {params.out} --pair {wildcards.pair}"
        " --stage {wildcards.stage} --coverage {params.coverage} --no-fail > {log} 2>&1"


# msprobe's own: a job a stage, so that none waits for another.
rule official_table:
    input:
        manifests=lambda wildcards: jobs.manifests(wildcards.pair),
        mark=lambda wildcards: jobs.pair_mark(wildcards.pair),
    output:
        jobs.official_files("{pair}", "{stage}"),
    log:
        f"{LOGS}/compare/{{pair}}/official-{{stage}}.log",
    priority: -1
    container:
        lambda wildcards: jobs.image(torch=True)
    resources:
        **slurm(ALIGNMENT.analysis.resources),
    params:
        sides=lambda wildcards, input: [
            Path(manifest).parent for manifest in input.manifests
        ],
        out=lambda wildcards, output: Path(output[0]).parents[1],
        steps=jobs.official_steps,
        graph="--graph" if ALIGNMENT.analysis.official_graph else "",
        rlprobe=jobs.entered(CONFIG, torch=True),
    message:
        "msprobe's own table of {wildcards.pair}: {wildcards.stage}"
    shell:
        "{params.rlprobe} official-table {params.sides} -o {params.out}"
        " --stage {wildcards.stage} --steps {params.steps} {params.graph} --no-fail"
        " > {log} 2>&1"


rule official_key_data:
    input:
        manifests=lambda wildcards: jobs.manifests(wildcards.pair),
        mark=lambda wildcards: jobs.pair_mark(wildcards.pair),
    output:
        directory(f"{RESULTS}/compare/{{pair}}/official_key_data"),
    log:
        f"{LOGS}/compare/{{pair}}/official-key-data.log",
    priority: -1
    container:
        lambda wildcards: jobs.image(torch=True)
    resources:
        **slurm(ALIGNMENT.analysis.resources),
    params:
        sides=lambda wildcards, input: [
            Path(manifest).parent for manifest in input.manifests
        ],
        out=lambda wildcards, output: Path(output[0]).parent,
        steps=jobs.official_steps,
        rlprobe=jobs.entered(CONFIG, torch=True),
    message:
        "msprobe's own tables of {wildcards.pair}: key data"
    shell:
        "{params.rlprobe} official-key-data {params.sides} -o {params.out}"
        " --steps {params.steps} --no-fail > {log} 2>&1"
