"""What claims, figures and sections are called for a reader, in English and in Chinese.

A claim without an entry here shows its own name; a test asks for one of every claim that a notebook
declares.
"""

from __future__ import annotations

from typing import Literal

Lang = Literal["en", "zh"]
LANGUAGES: tuple[Lang, ...] = ("en", "zh")

CLAIMS: dict[str, tuple[str, str]] = {
    # 00
    "every_result_readable": ("no result file is damaged", "所有结果文件均可读取"),
    "every_result_fresh": (
        "every result was made by the notebooks and code as they are now",
        "所有结果均由当前版本的 notebook 与代码得到",
    ),
    "every_notebook_ran": ("every notebook has a result here", "每个 notebook 在本机都有结果"),
    "article_reproduced": (
        "the article's story happens here too: exact and fast alone, folded away, other texts",
        "文中现象在此复现：单独测试又快又准，分支被折叠，文本改变",
    ),
    "drift_explained": (
        "the drift has a place, a cause and a control",
        "漂移有位置、有原因、有对照",
    ),
    "bits_kept_and_saving_kept": (
        "no bit changes in the model, and the saving arrives",
        "整模型比特不变，且节省的时间兑现",
    ),
    "kept_in_a_service": (
        "in a real vLLM too: no bit changes, the kernel runs, and the saving arrives",
        "在真实的 vLLM 中同样如此：比特不变，kernel 确实运行，节省兑现",
    ),
    # 01
    "bits_reference": (
        "bits equal those of the plain PyTorch reference",
        "与纯 PyTorch 参考实现逐比特一致",
    ),
    "bits_compiled": (
        "bits equal those of the compiled region, once calibrated",
        "校准数值方式后，与编译区域逐比特一致",
    ),
    "bits_independent": (
        "within the declared ULP bound of Hugging Face's code",
        "与 Hugging Face 实现之差不超过事先声明的 ULP 上界",
    ),
    "batch_invariant": (
        "a token's bits do not depend on the batch",
        "同一 token 的比特不随批大小变化",
    ),
    "eager_batch_invariant": (
        "eager PyTorch does not depend on the batch either",
        "eager PyTorch 的比特同样不随批大小变化",
    ),
    "faults_are_seen": ("planted faults are found", "人为植入的错误全部被检出"),
    "baseline_in_place": (
        "the compiled baseline does not copy the KV cache",
        "编译基线不会产生整个 KV cache 大小的拷贝",
    ),
    "overlap_same_bits": ("same bits when launches overlap", "与前一 kernel 重叠启动时比特不变"),
    "near_the_floor": ("close to the fastest copy of the same bytes", "接近同等数据量的最快拷贝"),
    "ahead_of_peers": (
        "ahead of vLLM's and aiter's kernels at equal work",
        "等量工作下快于 vLLM 与 aiter 的 kernel",
    ),
    "faster_than_compiled": ("faster than the static compile", "快于静态形状编译的基线"),
    # 02
    "answers_right": (
        "the service with dropped guards answers correctly",
        "去掉 guard 的服务回答仍然正确",
    ),
    "branch_folded": ("the branch is folded away in silence", "分支被静默折叠，无任何警告"),
    "kernel_reached": ("the fused kernel is reached", "融合 kernel 真正被执行"),
    "branch_can_be_kept": (
        "some way of tracing keeps the branch",
        "存在能够保留该分支的追踪方式",
    ),
    "finder_names_the_branch": ("the finder names the line", "特化查找器准确指出分支所在行"),
    "finder_silent_on_clean": (
        "the finder reports nothing where there is no branch",
        "没有分支时特化查找器不误报",
    ),
    # 03
    "marker_exact": ("the device marker counts every call", "设备端计数与实际调用次数完全相等"),
    "replay_unseen_by_host": (
        "graph replays are invisible to a host counter",
        "主机端计数器看不到图重放中的调用",
    ),
    "profiler_agrees": ("the profiler agrees with the marker", "性能分析器与设备端计数吻合"),
    "fallback_forced": (
        "with the fallback forced the kernel never runs",
        "强制回退时融合 kernel 一次也不运行",
    ),
    "fallback_bits": (
        "the fallback equals the standalone full graph, bit for bit",
        "回退路径与独立编译的完整图逐比特一致",
    ),
    "opcheck": ("the operator passes PyTorch's own check", "算子通过 PyTorch 自带的 opcheck"),
    "no_cache_copy": ("nothing copies the whole cache", "没有任何一步拷贝整个 KV cache"),
    "mistakes_caught": ("mistakes in a registration are caught", "算子注册中的典型错误均被检出"),
    "marker_cheap": ("the marker costs next to nothing", "设备端计数的开销可以忽略"),
    # 04
    "texts_unchanged": ("the texts do not change", "生成文本不变"),
    "candidate_ran": ("the candidate's paths really ran", "候选方案的各条路径确实被执行"),
    "same_program": (
        "the rebuild is the same program",
        "重新编译得到同一个程序（源码、配置、机器码）",
    ),
    "kernel_alone_exact": (
        "the kernel alone equals the compiled region",
        "单独运行时 kernel 与编译区域逐比特一致",
    ),
    "times_repeat": ("times of an unchanged arm repeat", "未作改动的对照组耗时可重复"),
    "resolves_mean_tpot": (
        "mean TPOT resolves the article's whole saving",
        "平均 TPOT 的分辨率足以看到文中的全部节省",
    ),
    "resolves_p99_tpot": (
        "p99 TPOT resolves the article's whole saving",
        "p99 TPOT 的分辨率足以看到文中的全部节省",
    ),
    "saving_arrives": ("the saving arrives in the model", "节省的时间在整模型中兑现"),
    "prefill_not_slower": ("prefill is not slower", "prefill 没有变慢"),
    # 05
    "control": ("the same process repeats its bits", "同一进程内重复运行，比特一致"),
    "fixed_point": ("rebuilt, the baseline keeps its bits", "基线重新编译后比特不变"),
    "recording_is_passive": ("recording changes nothing", "记录中间结果不改变计算"),
    "drift_without_the_kernel": (
        "bits drift although the kernel never runs",
        "融合 kernel 从未运行，比特仍然漂移",
    ),
    "prefill_drifts": ("eager prefill alone makes bits drift", "仅把 prefill 换成 eager 就会漂移"),
    "located": (
        "the first difference arises in that very prologue",
        "最先出现的差异就产生于该 prologue",
    ),
    "fallback_clears_the_kernel": (
        "after the same prefill, kernel and fallback decode alike",
        "同一 prefill 之后，kernel 与回退路径的 decode 比特一致",
    ),
    "boundary_alone": (
        "the operator's boundary alone changes no bit",
        "仅引入算子边界不改变任何比特",
    ),
    "fingerprint": (
        "declared numerics reproduce every element",
        "所声明的数值方式可复现每一个元素",
    ),
    "numerics_explain_it": (
        "the numerics alone explain the drift",
        "漂移完全由数值方式（舍入与归约顺序）解释",
    ),
    "suspects_judged": ("every suspect has an answer", "每个怀疑对象都有结论"),
    "coin_tosses": (
        "every changed token was a near tie",
        "每个改变的 token 原本就是势均力敌的选择",
    ),
    "faults_found": ("real faults are told from rounding", "真正的错误能与舍入差异区分开"),
    "rounding_is_no_fault": ("rounding is not called a fault", "舍入差异不会被误判为错误"),
    # 06
    "calibrated": (
        "declared numerics reproduce the compiled graph",
        "所声明的数值方式可复现编译图的每个元素",
    ),
    "calibration_is_quick": ("calibrating takes minutes, checking seconds", "校准与启动检查足够快"),
    "stale_is_refused": ("a spoiled calibration is refused", "失效的校准文件会被拒绝"),
    "integrated_exact": (
        "the integrated kernel changes no bit of the model",
        "集成后整模型一个比特都不变",
    ),
    "test_can_see": ("wrong numerics would have been seen", "若数值方式不对，这一检验能够发现"),
    "prefill_untouched": ("the prefill graph is left alone", "prefill 图未受影响"),
    "kernel_ran": ("the kernel ran in every decode call", "每次 decode 都执行了该 kernel"),
    "same_run": ("the timed process has equal bits too", "计时的同一进程内比特也一致"),
    "saving_as_predicted": ("the saving is as predicted", "节省的时间与预测相符"),
    "net_saving": (
        "a net saving against the unpinned baseline",
        "相对未固定配置的基线仍有净节省",
    ),
    # 07
    "servers_ready": ("every server of the service started", "所有服务进程均成功启动"),
    "client_complete": ("every request came back whole", "所有请求均完整返回"),
    "busy_service": (
        "in a busy service a kernel for one token hardly runs",
        "繁忙的服务中，只针对单 token 的 kernel 几乎不会执行",
    ),
    "upstream_identified": (
        "declared numerics reproduce upstream's own fused kernel",
        "所声明的数值方式可复现上游自带的融合 kernel",
    ),
    "upstream_differs": (
        "upstream's own fused kernel changes bits too",
        "上游自带的融合 kernel 同样会改变比特",
    ),
    "operator_exact": (
        "an operator at every size, calibrated, changes nothing",
        "每个大小都经过校准的算子不改变任何结果",
    ),
    "range_exact": (
        "the kernel is exact at every size of the decode range",
        "decode 范围内的每个大小都逐比特一致",
    ),
    "same_model": (
        "vLLM serves the model that this project's engine serves",
        "vLLM 与自带引擎服务的是同一个模型",
    ),
    "own_positions": (
        "requests with position rows of their own",
        "使用各自位置行的请求",
    ),
    "strides_assumed": (
        "graphs that vLLM compiles for one size read other positions",
        "vLLM 为单一大小编译的图会读错位置",
    ),
    "off_costs_nothing": (
        "the plugin, switched off, changes no code and costs nothing",
        "插件关闭时生成代码不变，也没有可测的开销",
    ),
}

FIGURES: dict[str, tuple[str, str]] = {
    "time_fused": ("time of the fused kernel, T=1, cold", "融合 kernel 耗时，T=1，冷缓存"),
    "time_compiled": (
        "time of the baseline (here: static compile), T=1, cold",
        "基线耗时（本机：静态编译），T=1，冷缓存",
    ),
    "speedup": ("speedup over the baseline, T=1", "相对基线的加速比，T=1"),
    "saving_layer": ("saving per layer", "每层节省"),
    "saving_token": ("saving per token, on paper", "每 token 节省（账面）"),
    "mismatch_reference": (
        "elements that differ from the reference, T=1",
        "与参考实现不同的元素数，T=1",
    ),
    "mismatch_compiled": (
        "elements that differ from the compiled region, T=1",
        "与编译区域不同的元素数，T=1",
    ),
    "marker_folded": (
        "kernel runs behind a Python branch, guards dropped",
        "Python 分支且去掉 guard 时，kernel 执行次数",
    ),
    "marker_eager": (
        "kernel runs of the same module in eager mode",
        "同一模块 eager 模式下的执行次数",
    ),
    "marker_replay": (
        "kernel runs behind an opaque op, in graph replay",
        "不透明算子内，图重放中的执行次数",
    ),
    "marker_served": (
        "kernel runs while ten requests are served",
        "服务十个请求期间 kernel 的执行次数",
    ),
    "marker_integrated": (
        "kernel runs of the calibrated integration",
        "校准后的集成方案中 kernel 的执行次数",
    ),
    "service_marker": ("kernel runs in the vLLM service", "vLLM 服务中 kernel 的执行次数"),
    "fallback_mismatch": (
        "elements in which the fallback differs from the standalone graph",
        "回退路径与独立完整图不同的元素数",
    ),
    "rebuild_records": (
        "records that differ after a rebuild of the baseline (the floor)",
        "基线重新编译后不同的记录数（噪声下限）",
    ),
    "fallback_records": (
        "records that differ with the fallback at every T",
        "全部走回退路径时不同的记录数",
    ),
    "integrated_records": (
        "records that differ with the calibrated integration",
        "校准后的集成方案中不同的记录数",
    ),
    "per_op_records": (
        "the same with wrong numerics, as a check",
        "同上，但故意用错数值方式（检验灵敏度）",
    ),
    "texts_control": ("texts changed, same baseline again", "文本改变数，同一基线再运行一次"),
    "texts_candidate": ("texts changed, the article's arm", "文本改变数，文中的集成方式"),
    "tokens_baseline": ("tokens of the baseline", "基线生成的 token 数"),
    "tokens_candidate": ("tokens of the article's arm", "文中集成方式生成的 token 数"),
    "texts_integrated": (
        "texts changed, calibrated integration",
        "文本改变数，校准后的集成方案",
    ),
    "service_records": (
        "records that differ in the vLLM service, kernel integrated",
        "kernel 集成到 vLLM 服务后，有差异的记录数",
    ),
    "service_saving_predicted": (
        "saving per token predicted for the vLLM service",
        "vLLM 服务每 token 的预测节省",
    ),
    "service_saving": (
        "saving per token realised in the vLLM service",
        "vLLM 服务每 token 的实际节省",
    ),
    "service_saving_net": (
        "the same against a vLLM without the plugin",
        "同上，相对不加载插件的 vLLM",
    ),
    "service_texts": ("texts changed in the vLLM service", "vLLM 服务中的文本改变数"),
    "tpot_candidate": (
        "mean TPOT, own engine (published: fallback-only run)",
        "平均 TPOT，自带引擎（公布值：仅回退的运行）",
    ),
    "tpot_change": (
        "change of mean TPOT, same words, own engine",
        "平均 TPOT 的变化，喂入相同 token，自带引擎",
    ),
    "ttft_candidate": ("p99 TTFT, own engine", "p99 TTFT，自带引擎"),
    "saving_candidate": (
        "saving per token, the article's arm",
        "每 token 实际节省，文中的集成方式",
    ),
    "saving_predicted": (
        "saving per token predicted from the kernel alone",
        "由单独测试预测的每 token 节省",
    ),
    "saving_realised": (
        "saving per token realised, calibrated integration",
        "每 token 实际节省，校准后的集成方案",
    ),
    "saving_net": (
        "net of its pins, against the baseline users run",
        "扣除固定配置代价后，相对用户实际基线的净节省",
    ),
    "service_tpot": ("mean TPOT, vLLM service", "平均 TPOT，vLLM 服务"),
    "service_ttft": ("p99 TTFT, vLLM service", "p99 TTFT，vLLM 服务"),
}

WORDS: dict[str, tuple[str, str]] = {
    "primitive": ("Primitive: the kernel alone", "原语（primitive）：单独的 kernel"),
    "integration": ("Integration: the kernel in the model", "集成（integration）：模型中的 kernel"),
    "performance": ("Performance", "性能"),
    "correctness": ("Bitwise correctness", "逐比特正确性"),
    "dispatch": ("Dispatch", "调度：kernel 是否真的被执行"),
    "graph": ("Graph compilation", "图编译"),
    "text": ("Generated text", "生成文本"),
    "endpoint": ("Endpoint metrics", "端到端指标"),
    "fresh": ("fresh", "有效"),
    "stale": ("stale", "已过期"),
    "incomplete": ("incomplete", "未完成"),
    "unreadable": ("not readable", "无法读取"),
    "missing": ("no result", "无结果"),
    "PASS": ("PASS", "通过 PASS"),
    "PASS_WITH_LIMITATIONS": ("PASS_WITH_LIMITATIONS", "有限通过 PASS_WITH_LIMITATIONS"),
    "FAIL": ("FAIL", "不成立 FAIL"),
    "INCONCLUSIVE": ("INCONCLUSIVE", "无定论 INCONCLUSIVE"),
    "NOT_RUN": ("NOT_RUN", "未运行 NOT_RUN"),
    "not_comparable": ("not comparable", "不可比（not_comparable）"),
    "published, gfx936": ("published, gfx936", "文中公布，gfx936"),
    "derived from published, gfx936": (
        "derived from published, gfx936",
        "由文中公布值推算，gfx936",
    ),
    "not stated": ("not stated", "文中未给出"),
    "of": ("{value} of {n}", "{value} / {n}"),
    "elements": ("{value} of {n} elements", "{value} / {n} 个元素"),
    "n": ("n = {n}", "n = {n}"),
    "bound": ("rate below {bound} (95 %)", "比例低于 {bound}（95%）"),
    "no figure": ("–", "–"),
    "none": ("none", "无"),
    "column notebook": ("notebook", "notebook"),
    "column claim": ("claim", "陈述"),
    "column verdict": ("verdict", "判定"),
    "column machines": ("machines", "机器"),
    "column state": ("state", "状态"),
    "column why": ("why", "依据（原始记录）"),
    "column claims": ("claims in it", "其中的判定"),
    "handed_in": (
        "Handed in and verified, not run by this project.",
        "由他人提交并通过校验，并非本项目运行。",
    ),
    "the whole notebook": ("the whole notebook", "整个 notebook"),
}


def claim(name: str, arm: str | None = None, lang: Lang = "en") -> str:
    """A claim in words, with its arm in brackets; its own name where there are none."""
    words = CLAIMS.get(name) or WORDS.get(name)
    text = words[LANGUAGES.index(lang)] if words else name
    brackets = "（{}）" if lang == "zh" else " [{}]"
    return text + brackets.format(arm) if arm else text


def figure(key: str, lang: Lang = "en") -> str:
    """A figure in words. KeyError: there is no such figure."""
    return FIGURES[key][LANGUAGES.index(lang)]


def word(key: str, lang: Lang = "en") -> str:
    """A section, a state, a verdict or a phrase in words. KeyError: there is no such word."""
    return WORDS[key][LANGUAGES.index(lang)]
