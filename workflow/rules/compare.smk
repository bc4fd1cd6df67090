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
    params:
        older=lambda wildcards: f"{RESULTS}/compare/{wildcards.pair}/.of-*",
    message:
        "sides of {wildcards.pair}: {wildcards.digest}"
    shell:
        "(rm -f {params.older} && touch {output}) 2> {log}"


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
    message:
        "compare {wildcards.pair}: {wildcards.stage}"
    shell:
        "rlprobe compare {params.sides} -o {params.out} --pair {wildcards.pair}"
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
            lambda wildcards: ALIGNMENT.analysis.torch_image
        resources:
            **slurm(ALIGNMENT.analysis.resources),
        params:
            sides=lambda wildcards, input: [
                Path(manifest).parent for manifest in input.manifests
            ],
            out=lambda wildcards, output: Path(output[0]).parents[1],
            stages=[f"--stage {stage}" for stage in jobs.stages(pair)],
        message:
            f"msprobe's own table of {pair}"
        shell:
            "rlprobe official-table {params.sides} -o {params.out} {params.stages} > {log} 2>&1"
