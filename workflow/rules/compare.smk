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
        "sides of {wildcards.pair}: {wildcards.digest}"
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


for pair in jobs.official_pairs():

    rule:
        name:
            f"official_table_{pair}"
        input:
            manifests=jobs.manifests(pair),
            mark=jobs.pair_mark(pair),
        output:
            [
                f"{RESULTS}/compare/{pair}/{stage}/official.{kind}"
                for stage in jobs.stages(pair)
                for kind in ("csv", "xlsx")
            ],
        log:
            f"{LOGS}/compare/{pair}/official.log",
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
            stages=[f"--stage {stage}" for stage in jobs.stages(pair)],
            steps="all" if ALIGNMENT.analysis.official_table == "all" else "first",
            rlprobe=jobs.entered(CONFIG, torch=True),
        message:
            f"msprobe's own table of {pair}"
        shell:
            "{params.rlprobe} official-table {params.sides} -o {params.out} {params.stages}"
            " --steps {params.steps} > {log} 2>&1"
