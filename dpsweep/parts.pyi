"""Types of `dpsweep.parts`. Written by ``python docs/parts.py``."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias, TypedDict, TypeVar

T = TypeVar("T")
Each: TypeAlias = T | Sequence[T]
"""A value, or a list of values that the sweep varies."""
Part: TypeAlias = str | Mapping[str, Any]
"""A component by its name, or with its parameters."""

class AccountingSection(TypedDict, total=False):
    individual: Literal["rdp", "rdp-classic", "pld"]
    also: Each[str]
    group_sizes: Each[int]
    actors: int | None
    cpus: float | None
    resource: str | None

class AttackSection(TypedDict, total=False):
    loss_threshold: bool
    training_scores: bool
    rmia: RmiaSection | None
    exposure: ExposureSection | None

class AuditSection(TypedDict, total=False):
    canaries: int
    confidence: float
    kind: Literal["rows", "gradient"]
    transcript: Literal["iterates", "last_model"]

class BaselineSection(TypedDict, total=False):
    optimizer: Part | None

class BudgetSection(TypedDict, total=False):
    rho: float | None
    epsilon: float | None
    covers: Literal["everything", "training"]

class CompareSection(TypedDict, total=False):
    worst_group: (
        Literal[
            "accuracy",
            "accuracy_change",
            "user_accuracy",
            "balanced_accuracy",
            "true_positive_rate",
            "false_positive_rate",
            "precision",
            "log_loss",
            "calibration_error",
            "token_accuracy",
            "perplexity",
            "token_loss",
            "token_accuracy_change",
            "micro_f1",
            "macro_f1",
            "label_accuracy",
            "exact_match",
            "micro_f1_change",
            "r2",
            "mse",
            "mae",
            "r2_change",
            "mean_iou",
            "mean_dice",
            "pixel_accuracy",
            "mean_iou_change",
        ]
        | None
    )
    detect: float | None
    looks: int

class ExecutionSection(TypedDict, total=False):
    device: str
    allow_cpu: bool
    micro_batch_size: int | None
    last_micro_batch: Literal["shorter", "padded"]
    threads: int
    checkpoint_every_epochs: float
    deterministic: bool
    autocast: bool

class ExposureSection(TypedDict, total=False):
    canaries: int
    repeats: int
    length: int
    candidates: int

class NormSection(TypedDict, total=False):
    refreshes_per_epoch: Each[float | Literal["auto", "every_step", "when_sampled", "off"]]
    rows_per_part: Each[int]
    exact_examples: Each[int]

class PrivacySection(TypedDict, total=False):
    delta: float
    target_epsilon: Each[float] | None
    noise_multiplier: Each[float] | None
    budget: BudgetSection | None
    adjacency: Literal["add_remove", "zero_out", "fixed_graph", "replace_one"] | None
    accountant: str
    unit: Literal["example", "user"]
    user_sampling: Each[Literal["els", "uls"]] | None
    max_records_per_user: Each[int] | None
    rows_per_user: RowsPerUserSection | None

class ResourceSection(TypedDict, total=False):
    when: Mapping[str, Each[str]]
    cpus: float
    gpus: float
    ranks: int | None
    ranks_on: Literal["one_node", "nodes"]
    shard: Literal["frozen", "all"] | None
    labels: Mapping[str, str]
    max_concurrent: int | None
    max_failures: int

class RmiaSection(TypedDict, total=False):
    reference_models: int

class RowsPerUserSection(TypedDict, total=False):
    users: Mapping[str, int]
    noise_multiplier: float | None

class SamplingSection(TypedDict, total=False):
    method: Each[Literal["poisson", "fixed", "shuffle", "random_allocation", "cyclic_poisson", "fixed_order"]]
    batch_size: Each[int | Literal["full"]]
    max_batch_size: Each[int | None]
    per_epoch: Each[int | None]
    cycle_length: Each[int | None]

class SchedulerSection(TypedDict, total=False):
    name: Literal["fifo", "asha"]
    metric: Literal["public_accuracy", "test_accuracy"]
    grace_epochs: int
    reduction_factor: int
    accept_unaccounted_selection: bool

class TuneSection(TypedDict, total=False):
    parameters: Mapping[str, Any]
    search: Literal["grid", "random", "optuna"]
    samples: int | None
    seeds: Each[int]
    select_by: Literal[
        "accuracy",
        "worst_group_accuracy",
        "worst_group_balanced_accuracy",
        "worst_group_true_positive_rate",
        "loss",
        "token_accuracy",
        "worst_group_token_accuracy",
        "perplexity",
        "worst_group_perplexity",
        "token_loss",
        "worst_group_token_loss",
        "micro_f1",
        "worst_group_micro_f1",
        "macro_f1",
        "worst_group_macro_f1",
        "label_accuracy",
        "worst_group_label_accuracy",
        "exact_match",
        "worst_group_exact_match",
        "r2",
        "worst_group_r2",
        "mse",
        "worst_group_mse",
        "mae",
        "worst_group_mae",
        "mean_iou",
        "worst_group_mean_iou",
        "mean_dice",
        "worst_group_mean_dice",
        "pixel_accuracy",
        "worst_group_pixel_accuracy",
    ]
    privacy: Literal["public", "private_selection", "exponential_mechanism", "unaccounted"]
    data: Part | None
    trials: float | None
    shape: float | None
    epsilon: float | None

class _Data:
    def adult(
        self,
        *,
        root: Each[str | None] = None,
        group: Each[str | Sequence[str]] = "sex",
        exclude: Each[Sequence[str]] = ("education", "race", "native-country"),
        split: Each[Literal["published", "drawn"]] = "published",
    ) -> Part:
        """Return the 45,222 complete rows of adult.data (training) and adult.test (test)."""
    def breast_cancer(self) -> Part:
        """Return 569 rows of 30 attributes in [0, 1], by published ranges; groups are the two diagnoses."""
    def breast_cancer_wisconsin(self, *, root: Each[str | None] = None) -> Part: ...
    def cifar10(self, *, root: Each[str | None] = None, cache: Each[str | None] = None) -> Part:
        """Return 50,000 + 10,000 colour pictures of 32 x 32 pixels; groups are the ten classes."""
    def csv(
        self,
        *,
        path: Each[str],
        label: Each[str | Sequence[str]],
        features: Each[Sequence[str] | None] = None,
        group: Each[str | Sequence[str] | None] = None,
        user: Each[str | Sequence[str] | None] = None,
        user_separator: Each[str | None] = None,
        test_path: Each[str | None] = None,
        ranges: Each[Mapping[str, Sequence[float]] | None] = None,
        categories: Each[Mapping[str, Sequence[str | bool | int | float]] | None] = None,
        classes: Each[Sequence[str | bool | int | float] | None] = None,
        groups: Each[
            Sequence[str | bool | int | float] | Mapping[str, Sequence[str | bool | int | float]] | None
        ] = None,
        numbers: Each[Mapping[str, Literal["point", "comma"]] | None] = None,
        unscaled: Each[Sequence[str]] = (),
        hashed: Each[Mapping[str, int] | None] = None,
        encoding: Each[str | None] = None,
        ignore_case: Each[Sequence[str]] = (),
        task: Each[Literal["classification", "regression", "multi_label"]] = "classification",
    ) -> Part: ...
    def digits(self) -> Part:
        """Return 1797 real images, pixel values 0..16 scaled to 0..1; groups are the ten digits."""
    def dutch(
        self,
        *,
        root: Each[str | None] = None,
        group: Each[str | Sequence[str]] = "sex",
        exclude: Each[Sequence[str]] = ("age", "cur_eco_activity"),
    ) -> Part:
        """Return the 60,420 rows of dutch.csv, with every attribute one-hot."""
    def fashion_mnist(self, *, root: Each[str | None] = None) -> Part:
        """Return 60,000 + 10,000 pictures of clothes of 28 x 28 pixels; groups are the ten classes."""
    def image_folder(
        self,
        *,
        path: Each[str],
        size: Each[int] = 32,
        groups: Each[str | None] = None,
        classes: Each[Sequence[str] | None] = None,
        group_names: Each[Sequence[str] | Mapping[str, Sequence[str]] | None] = None,
        group: Each[str | Sequence[str]] = "group",
    ) -> Part: ...
    def image_masks(
        self,
        *,
        path: Each[str],
        classes: Each[Sequence[str]],
        size: Each[int] = 64,
        values: Each[Sequence[int] | None] = None,
        ignored: Each[int | None] = 255,
        groups: Each[str | None] = None,
        group_names: Each[Sequence[str] | Mapping[str, Sequence[str]] | None] = None,
        group: Each[str | Sequence[str]] = "group",
    ) -> Part: ...
    def image_table(
        self,
        *,
        path: Each[str],
        image: Each[str],
        label: Each[str | Sequence[str]],
        folder: Each[str | None] = None,
        size: Each[int] = 32,
        task: Each[Literal["classification", "regression", "multi_label"]] = "classification",
        group: Each[str | Sequence[str] | None] = None,
        user: Each[str | Sequence[str] | None] = None,
        user_separator: Each[str | None] = None,
        test_path: Each[str | None] = None,
        classes: Each[Sequence[str | bool | int | float] | None] = None,
        groups: Each[
            Sequence[str | bool | int | float] | Mapping[str, Sequence[str | bool | int | float]] | None
        ] = None,
        ranges: Each[Mapping[str, Sequence[float]] | None] = None,
        encoding: Each[str | None] = None,
    ) -> Part:
        """Return the pictures whose files the column ``image`` of a .csv, .tsv, .jsonl or .parquet file names."""
    def mnist(self, *, root: Each[str | None] = None) -> Part:
        """Return 60,000 + 10,000 handwritten digits of 28 x 28 pixels; groups are the digits."""
    def parquet(
        self,
        *,
        path: Each[str],
        label: Each[str | Sequence[str]],
        features: Each[Sequence[str] | None] = None,
        group: Each[str | Sequence[str] | None] = None,
        user: Each[str | Sequence[str] | None] = None,
        user_separator: Each[str | None] = None,
        test_path: Each[str | None] = None,
        ranges: Each[Mapping[str, Sequence[float]] | None] = None,
        categories: Each[Mapping[str, Sequence[str | bool | int | float]] | None] = None,
        classes: Each[Sequence[str | bool | int | float] | None] = None,
        groups: Each[
            Sequence[str | bool | int | float] | Mapping[str, Sequence[str | bool | int | float]] | None
        ] = None,
        numbers: Each[Mapping[str, Literal["point", "comma"]] | None] = None,
        unscaled: Each[Sequence[str]] = (),
        hashed: Each[Mapping[str, int] | None] = None,
        encoding: Each[str | None] = None,
        ignore_case: Each[Sequence[str]] = (),
        task: Each[Literal["classification", "regression", "multi_label"]] = "classification",
    ) -> Part: ...
    def text(
        self,
        *,
        path: Each[str],
        text: Each[str],
        tokenizer: Each[str],
        max_length: Each[int] = 128,
        objective: Each[Literal["label", "masked_lm", "causal_lm"]] = "label",
        label: Each[str | Sequence[str] | None] = None,
        task: Each[Literal["classification", "regression", "multi_label"]] = "classification",
        group: Each[str | Sequence[str] | None] = None,
        user: Each[str | Sequence[str] | None] = None,
        user_separator: Each[str | None] = None,
        test_path: Each[str | None] = None,
        classes: Each[Sequence[str | bool | int | float] | None] = None,
        groups: Each[
            Sequence[str | bool | int | float] | Mapping[str, Sequence[str | bool | int | float]] | None
        ] = None,
        ranges: Each[Mapping[str, Sequence[float]] | None] = None,
        padding_token: Each[str | None] = None,
        mask_token: Each[str] = "[MASK]",
        mask_fraction: Each[float] = 0.15,
        mask_seed: Each[int] = 0,
        cache: Each[str | None] = None,
        encoding: Each[str | None] = None,
    ) -> Part:
        """Return the column ``text`` of a .csv, .tsv (with a header), .parquet or .jsonl file, as token ids."""
    def utkface(
        self,
        *,
        root: Each[str | None] = None,
        task: Each[str] = "gender",
        size: Each[int] = 64,
        labels: Each[Literal["balanced", "all"]] = "balanced",
        races: Each[Sequence[str]] = ("White", "Black", "Asian", "Indian", "Other"),
        group: Each[str | Sequence[str]] = "race",
    ) -> Part:
        """Return faces (.jpg, .jpeg, any case) below the folder ``UTKFace``, resized to size x size."""

Data: Final[_Data]

class _Model:
    def cancer_net(self) -> Part:
        """Return an MLP with hidden layers of 10, 20 and 10 units (Yu et al. 2019, Breast Cancer)."""
    def cnn_dpsgdf(
        self,
        *,
        channels: Each[Sequence[int]] = (20, 50),
        kernel_size: Each[int] = 5,
        padding: Each[int] = 0,
        hidden: Each[int] = 500,
    ) -> Part: ...
    def cnn_papernot(
        self, *, scale: Each[float] = 2.0, inverse_temperature: Each[float] = 2.0, offset: Each[float] = 1.0
    ) -> Part:
        """Return the two-layer CNN for MNIST-sized images of Papernot et al. (2020), with tempered sigmoids."""
    def hugging_face(
        self,
        *,
        path: Each[str],
        head: Each[Literal["classification", "regression", "linear", "causal_lm", "masked_lm"]] = "classification",
        adapter: Each[Any | None] = None,
        trainable: Each[Literal["all", "head", "bias"]] = "all",
        dtype: Each[Literal["float32", "bfloat16"]] = "float32",
        padding: Each[int | None] = None,
        checkpointing: Each[bool] = False,
        vocabulary: Each[int | None] = None,
        causal: Each[bool | None] = None,
    ) -> Part:
        """Return a pretrained model for token ids [b, t], without dropout."""
    def language_model(
        self,
        *,
        width: Each[int] = 64,
        depth: Each[int] = 2,
        heads: Each[int] = 4,
        padding: Each[int | None] = None,
        causal: Each[bool] = False,
    ) -> Part: ...
    def logistic(self) -> Part: ...
    def mlp(self, *, hidden: Each[Sequence[int]] = (128,), activation: Each[str] = "relu") -> Part:
        """Make fully connected hidden layers of sizes ``hidden``, each followed by the activation."""
    def pca_mlp(self, *, hidden: Each[int] = 1000) -> Part: ...
    def resnet20_gn(self, *, groups: Each[int] = 16, initial_weights: Each[str | None] = None) -> Part: ...
    def transformer(
        self,
        *,
        width: Each[int] = 64,
        depth: Each[int] = 2,
        heads: Each[int] = 4,
        patch_size: Each[int] = 4,
        vocabulary: Each[int | None] = None,
        padding: Each[int | None] = None,
    ) -> Part:
        """Return a pre-norm transformer encoder with mean pooling."""
    def unet(self, *, width: Each[int] = 16, depth: Each[int] = 2, groups: Each[int] = 4) -> Part:
        """Return a U-Net (Ronneberger et al. 2015) with ``depth`` downsampling levels and group normalisation."""
    def vision(
        self,
        *,
        package: Each[Literal["timm", "torchvision"]],
        architecture: Each[str],
        initial_weights: Each[str | None] = None,
        trainable: Each[Literal["all", "head", "bias"]] = "all",
        adapter: Each[Any | None] = None,
        size: Each[int | None] = None,
        pixel_offset: Each[Sequence[float] | None] = None,
        pixel_scale: Each[Sequence[float] | None] = None,
    ) -> Part:
        """Return a network of timm or torchvision for pictures [b, 1 or 3, height, width]."""
    def wide_resnet(self, *, depth: Each[int] = 16, width: Each[int] = 4, groups: Each[int] = 16) -> Part: ...
    def wrn16_4(self, *, groups: Each[int] = 16) -> Part:
        """Return WRN-16-4 of De et al. (2022), which Yu et al. (2023) use on CIFAR-10."""

Model: Final[_Model]

class _Preprocessing:
    def dp_pca(self, *, dimensions: Each[int] = 60, noise_multiplier: Each[float] = 16.0) -> Part: ...
    def frozen_features(
        self,
        *,
        network: Each[str] = "vgg16",
        weights: Each[str] = "imagenet",
        size: Each[int | None] = None,
        cache: Each[str | None] = None,
    ) -> Part:
        """Features of a network trained on public data (Yu et al. 2019, Sec. V: VGG16 for CIFAR-10)."""
    def robust_ranges(
        self, *, columns: Each[int | None] = None, noise_multiplier: Each[float] = 8.0, outside: Each[float] = 0.05
    ) -> Part: ...
    def standardised(self, *, columns: Each[int | None] = None, noise_multiplier: Each[float] = 8.0) -> Part:
        """Numbers that declared ranges scale to [0, 1], centred, and divided by their common deviation."""
    def text_features(self, *, path: Each[str], cache: Each[str | None] = None) -> Part:
        """The mean of the last hidden states of a pretrained model of transformers, scaled to length 1."""

Preprocessing: Final[_Preprocessing]

class _Loss:
    def binary_cross_entropy(self) -> Part:
        """Return the mean over labels of -ln p(0 or 1), p = sigmoid(logit): logits and labels [b, L]."""
    def binary_logistic(self) -> Part:
        """Return the logistic loss log(1 + exp(-s z)) of two classes, s = +1 for class 1 and -1 for class 0."""
    def causal_lm(self) -> Part: ...
    def cross_entropy(self) -> Part:
        """Return cross-entropy: -log softmax(logits)[label]."""
    def hinge(self, *, margin: Each[float] = 1.0) -> Part: ...
    def masked_lm(self) -> Part: ...
    def mse(self) -> Part:
        """Return the mean over targets of (output - target)^2: outputs and labels [b, T]."""
    def pixel_cross_entropy(self) -> Part: ...

Loss: Final[_Loss]

class _Optimizer:
    def sgd(
        self,
        *,
        learning_rate: Each[float],
        momentum: Each[float] = 0.0,
        nesterov: Each[bool] = False,
        weight_decay: Each[float] = 0.0,
    ) -> Part:
        """The update of torch.optim.SGD. Raises: InvalidInput for values out of range."""
    def adam(
        self,
        *,
        learning_rate: Each[float] = 0.001,
        beta1: Each[float] = 0.9,
        beta2: Each[float] = 0.999,
        epsilon: Each[float] = 1e-08,
        weight_decay: Each[float] = 0.0,
    ) -> Part:
        """The update of torch.optim.Adam. Raises: InvalidInput for values out of range."""
    def adamw(
        self,
        *,
        learning_rate: Each[float] = 0.001,
        beta1: Each[float] = 0.9,
        beta2: Each[float] = 0.999,
        epsilon: Each[float] = 1e-08,
        weight_decay: Each[float] = 0.01,
    ) -> Part:
        """The update of torch.optim.AdamW."""
    def adam_corrected(
        self,
        *,
        learning_rate: Each[float] = 0.001,
        beta1: Each[float] = 0.9,
        beta2: Each[float] = 0.999,
        floor: Each[float] = 0.001,
        weight_decay: Each[float] = 0.0,
    ) -> Part: ...

Optimizer: Final[_Optimizer]

class _LearningRateSchedule:
    def constant(self, *, warmup_epochs: Each[float] = 0.0) -> Part:
        """Factor 1, after a linear warm-up."""
    def cosine(self, *, warmup_epochs: Each[float] = 0.0, end: Each[float] = 0.0) -> Part:
        """Half a cosine from 1 to ``end`` over the run, after a linear warm-up."""
    def linear(self, *, end: Each[float], epochs: Each[float]) -> Part: ...
    def step(self, *, factor: Each[float], period_epochs: Each[float]) -> Part:
        """Step decay: factor^floor(epoch / period_epochs)."""
    def inverse_sqrt_steps(self) -> Part:
        """Constant factor 1 / sqrt(T), with T the planned number of steps (paper D)."""

LearningRateSchedule: Final[_LearningRateSchedule]

class _Augmentation:
    def flip_and_crop(self, *, multiplicity: Each[int] = 1, padding: Each[int] = 4) -> Part: ...

Augmentation: Final[_Augmentation]

class _Averaging:
    def ema(self, *, decay: Each[float] = 0.999) -> Part:
        """Exponential moving average of the parameters, with decay min(decay, (1 + t) / (10 + t)) at step t."""

Averaging: Final[_Averaging]

class _Clipping:
    def none(self, *, bound: Each[float | Any | Mapping[str, Any]] = 1.0) -> Part:
        """Weight 1 for every gradient. The sensitivity is infinite, so a trial with noise is refused."""
    def flat(self, *, bound: Each[float | Any | Mapping[str, Any]] = 1.0) -> Part:
        """Each gradient g becomes g * min(1, C / ||g||): the DP-SGD of Abadi et al. (2016). Sensitivity C."""
    def per_layer(self, *, bound: Each[float | Any | Mapping[str, Any]] = 1.0) -> Part:
        """The gradient of each of L layers is clipped at C / sqrt(L) (McMahan et al., 2018)."""
    def automatic(self, *, bound: Each[float | Any | Mapping[str, Any]] = 1.0, stability: Each[float] = 0.01) -> Part:
        """Each gradient g becomes C g / (||g|| + stability): AUTO-S; with stability 0, AUTO-V. Sensitivity C."""
    def quantile(
        self,
        *,
        bound: Each[float | Any | Mapping[str, Any]] = 1.0,
        quantile: Each[float] = 0.5,
        learning_rate: Each[float] = 0.2,
        count_noise_multiplier: Each[float] = 20.0,
    ) -> Part:
        """Flat clipping whose bound moves towards the ``quantile`` (gamma) of the norms. Sensitivity C_t."""
    def dpsgd_f(
        self,
        *,
        bound: Each[float | Any | Mapping[str, Any]] = 1.0,
        count_noise_multiplier: Each[float] = 10.0,
        count_memory: Each[float] = 0.0,
        max_ratio: Each[float] = 10.0,
    ) -> Part:
        """Gradients of group k are clipped at C_k = C0 (1 + (m_k / b_k) / (m / b)) (Xu et al., 2021)."""
    def naive(
        self,
        *,
        bound: Each[float | Any | Mapping[str, Any]] = 1.0,
        count_noise_multiplier: Each[float] = 10.0,
        count_memory: Each[float] = 0.0,
        max_weight: Each[float] = 10.0,
    ) -> Part: ...
    def individual(self, *, bound: Each[float | Any | Mapping[str, Any]] = 1.0) -> Part:
        """g_i * min(1, Z_i / ||g_i||) with Z_i = min(norm of g_i at the last refresh, C). Sensitivity C."""
    def filter(
        self,
        *,
        bound: Each[float | Any | Mapping[str, Any]] = 1.0,
        epsilon: Each[float | None] = None,
        noise_factor: Each[float] = 0.9,
    ) -> Part: ...
    def global_(
        self, *, bound: Each[float | Any | Mapping[str, Any]] = 1.0, threshold_ratio: Each[float] = 10.0
    ) -> Part:
        """(C / Z) g if ||g|| <= Z, else 0, with Z = threshold_ratio * C (Bu et al., 2021). Sensitivity C."""
    def global_adaptive(
        self,
        *,
        bound: Each[float | Any | Mapping[str, Any]] = 1.0,
        threshold_ratio: Each[float] = 10.0,
        learning_rate: Each[float] = 0.1,
        tolerance: Each[float] = 1.0,
        count_noise_multiplier: Each[float] = 10.0,
    ) -> Part: ...

Clipping: Final[_Clipping]

class _Noise:
    def constant(
        self,
        *,
        hold_before: Each[int] = 0,
        hold_after: Each[int | None] = None,
        noise_multiplier: Each[float] | None = None,
    ) -> Part:
        """sigma_t = sigma_0."""
    def time(
        self,
        *,
        decay: Each[float],
        every: Each[int] = 1,
        hold_before: Each[int] = 0,
        hold_after: Each[int | None] = None,
        noise_multiplier: Each[float] | None = None,
    ) -> Part:
        """sigma_t = sigma_0 / (1 + decay * floor(t / every)) (paper C, Sec. IV-A2 a)."""
    def exponential(
        self,
        *,
        decay: Each[float],
        every: Each[int] = 1,
        hold_before: Each[int] = 0,
        hold_after: Each[int | None] = None,
        noise_multiplier: Each[float] | None = None,
    ) -> Part:
        """sigma_t = sigma_0 * exp(-decay * floor(t / every)) (paper C, Sec. IV-A2 b)."""
    def step(
        self,
        *,
        factor: Each[float],
        period: Each[int],
        hold_before: Each[int] = 0,
        hold_after: Each[int | None] = None,
        noise_multiplier: Each[float] | None = None,
    ) -> Part:
        """sigma_t = sigma_0 * factor^floor(t / period) (paper C, Sec. IV-A2 c)."""
    def polynomial(
        self,
        *,
        end_noise_multiplier: Each[float],
        period: Each[int],
        power: Each[float],
        hold_before: Each[int] = 0,
        hold_after: Each[int | None] = None,
        noise_multiplier: Each[float] | None = None,
    ) -> Part:
        """sigma_t = (sigma_0 - sigma_end) (1 - t / period)^power + sigma_end (paper C, Sec. IV-A2 d)."""
    def linear(
        self,
        *,
        end_noise_multiplier: Each[float],
        period: Each[int],
        hold_before: Each[int] = 0,
        hold_after: Each[int | None] = None,
        noise_multiplier: Each[float] | None = None,
    ) -> Part:
        """A straight line from sigma_0 to sigma_end: the polynomial schedule of power 1."""
    def cosine(
        self,
        *,
        end_noise_multiplier: Each[float],
        period: Each[int],
        hold_before: Each[int] = 0,
        hold_after: Each[int | None] = None,
        noise_multiplier: Each[float] | None = None,
    ) -> Part:
        """Half a cosine from sigma_0 to sigma_end: flat at both ends."""
    def validation(
        self,
        *,
        factor: Each[float],
        period: Each[int],
        threshold: Each[float] = 0.0,
        window: Each[int] = 1,
        hold_before: Each[int] = 0,
        hold_after: Each[int | None] = None,
        noise_multiplier: Each[float] | None = None,
    ) -> Part: ...
    def banded(self, *, bands: Each[int], noise_multiplier: Each[float] | None = None) -> Part: ...
    def bisr(self, *, bands: Each[int], noise_multiplier: Each[float] | None = None) -> Part:
        """C^-1 has ``bands`` diagonals, from the inverse square root of prefix sums: BISR, arXiv 2505.12128."""
    def lambda_cgd(self, *, decay: Each[float], noise_multiplier: Each[float] | None = None) -> Part: ...
    def blt(self, *, buffers: Each[int], noise_multiplier: Each[float] | None = None) -> Part: ...

Noise: Final[_Noise]

class _Release:
    def none(self) -> Part:
        """Release of a mode that has no mechanism and takes no parameters."""
    def private(
        self,
        *,
        bins: Each[int] = 20,
        histogram_noise_multiplier: Each[float] = 20.0,
        group_count_noise_multiplier: Each[float] = 20.0,
        group_sum_noise_multiplier: Each[float] = 20.0,
        quantiles: Each[Sequence[float]] = (),
        quantile_steps: Each[int] = 20,
        quantile_noise_multiplier: Each[float] = 100.0,
    ) -> Part:
        """The statistics that are released, and their noise: each multiplier is noise std over L2 sensitivity."""
    def raw(self) -> Part:
        """Release of a mode that has no mechanism and takes no parameters."""

Release: Final[_Release]

class Sweep(Mapping[str, Any]):
    """A sweep as a mapping, for `dpsweep.plan` and `dpsweep.run`, with the keys of a sweep file as arguments."""

    def __init__(
        self,
        *,
        name: str,
        data: Any,
        model: Each[Part | Callable[..., Any]],
        sampling: Each[SamplingSection],
        epochs: Each[int],
        clipping: Any,
        privacy: PrivacySection,
        drafted: bool = ...,
        preprocessing: Each[Part | None] = ...,
        loss: Each[Part | Callable[..., Any]] = ...,
        optimizer: Each[Part] = ...,
        learning_rate_schedule: Each[Part] = ...,
        augmentation: Each[Part | None] = ...,
        averaging: Each[Part | None] = ...,
        noise: Each[Part] = ...,
        seeds: Each[int] = ...,
        baseline: BaselineSection = ...,
        reference: bool = ...,
        norms: Each[NormSection] | Literal["off"] = ...,
        attacks: AttackSection | None = ...,
        min_group_size: int | None = ...,
        without_gradient: Each[str] = ...,
        audit: AuditSection | None = ...,
        noise_source: Literal["seeded", "os_entropy", "os_entropy_secure"] = ...,
        accounting: AccountingSection = ...,
        release: Part = ...,
        compare: CompareSection = ...,
        scheduler: SchedulerSection = ...,
        resources: Each[ResourceSection] = ...,
        execution: ExecutionSection = ...,
        notify: Each[str] = ...,
        tune: TuneSection | None = ...,
        zip: Each[Each[str]] | None = ...,
    ) -> None: ...
    def __getitem__(self, key: str) -> Any: ...
    def __iter__(self) -> Iterator[str]: ...
    def __len__(self) -> int: ...
    def to_yaml(self) -> str:
        """Return the sweep as the text of a sweep file."""
