# From differences to a verdict and a page that says why.


rule plan:
    output:
        plan=jobs.plan_file,
        # Named after the plan's digest, so that another plan makes everything below anew.
        mark=jobs.plan_mark,
    log:
        f"{LOGS}/plan.log",
    # On the scheduling host, which can read the models that the keys are made from.
    container:
        lambda wildcards: None
    params:
        config=CONFIG,
    message:
        "plan: {output.plan}"
    shell:
        "rlprobe config plan {params.config} > {log} 2>&1"


rule diagnose:
    input:
        [
            f"{RESULTS}/compare/{pair}/{stage}/summary.json"
            for pair in jobs.pairs
            for stage in jobs.stages(pair)
        ],
        jobs.read_whole(),
        plan=jobs.plan_file,
        mark=jobs.plan_mark,
    output:
        f"{RESULTS}/diagnosis.json",
    log:
        f"{LOGS}/diagnose.log",
    resources:
        **slurm(ALIGNMENT.analysis.resources),
    params:
        results=lambda wildcards: RESULTS,
        rlprobe=jobs.entered(CONFIG),
    message:
        "diagnose {params.results}"
    shell:
        "{params.rlprobe} diagnose {params.results} --no-fail > {log} 2>&1"


# What the page says of a divergence is what a closer look at its suspects showed.
rule report:
    input:
        f"{RESULTS}/diagnosis.json",
        lambda wildcards: (
            jobs.refinement(checkpoints.suspects.get().output[0]) if REFINES else []
        ),
    output:
        report(
            f"{RESULTS}/report.html",
            caption="../report/page.rst",
            category="Alignment",
        ),
    log:
        f"{LOGS}/report.log",
    resources:
        **slurm(ALIGNMENT.analysis.resources),
    params:
        results=lambda wildcards: RESULTS,
        rlprobe=jobs.entered(CONFIG),
    message:
        "page: {output}"
    shell:
        "{params.rlprobe} report {params.results} > {log} 2>&1"


# Last, when the page that says why is there: a target that could not be judged fails the workflow,
# one that diverged only where the alignment asks for it.
rule verdict:
    input:
        diagnosis=f"{RESULTS}/diagnosis.json",
        page=f"{RESULTS}/report.html",
    output:
        f"{RESULTS}/verdict.txt",
    log:
        f"{LOGS}/verdict.log",
    params:
        diverged=0 if ALIGNMENT.fail_on_divergence else 3,
    message:
        "verdict: {output}, page {input.page}"
    shell:
        "rlprobe verdict {input.diagnosis} 2> {log} | tee {output} >> {log}"
        " || [ $? -eq {params.diverged} ]"
