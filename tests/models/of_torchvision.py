"""Families of torchvision, small and of random weights, as shipped and after the cure that a refusal names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from torch import nn
from torchvision import models
from torchvision.models import efficientnet, regnet, vgg
from torchvision.models import mobilenetv3 as v3
from torchvision.models.convnext import CNBlockConfig
from torchvision.models.googlenet import Inception
from torchvision.models.resnet import BasicBlock, Bottleneck
from torchvision.models.swin_transformer import SwinTransformerBlock, SwinTransformerBlockV2
from torchvision.models.video import resnet as clips

from tests.models.brought import Brought

NO_BATCH = r"torch\.nn\.GroupNorm"
GROUPS = {"norm_layer": partial(nn.GroupNorm, 1)}


def of_classes(kind: Callable[..., nn.Module], *sizes: object, **options: object) -> nn.Module:
    return kind(*sizes, num_classes=4, **options)


def in_groups(model: nn.Module) -> nn.Module:
    """The model with every batch norm replaced by a group norm, as a refusal says."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.BatchNorm2d | nn.BatchNorm3d):
                setattr(module, name, nn.GroupNorm(1, child.num_features))
    return model


def resnet(**options: object) -> nn.Module:
    return of_classes(models.ResNet, BasicBlock, [1, 1, 1, 1], **options)


def narrow(**options: object) -> nn.Module:
    """A residual network whose last two stages are taken off, as people do for small pictures."""
    return cut(of_classes(models.ResNet, Bottleneck, [1, 1, 1, 1], **options), 512)


def moving(convolution: type[nn.Module]) -> nn.Module:
    """A residual network of clips with two of its four stages."""
    return cut(of_classes(clips.VideoResNet, clips.BasicBlock, [convolution] * 4, [1] * 4, clips.BasicStem), 128)


def cut(model: nn.Module, width: int) -> nn.Module:
    """The model without its last two stages, which leaves ``width`` channels."""
    for name, part in (("layer3", nn.Identity()), ("layer4", nn.Identity()), ("fc", nn.Linear(width, 4))):
        setattr(model, name, part)
    return model


def fine_tuned() -> nn.Module:
    """A pretrained network in evaluation mode of which the last layer alone trains."""
    model = resnet().eval().requires_grad_(False)
    model.fc = nn.Linear(512, 4)
    return model


def mobile(**options: object) -> nn.Module:
    stages = [[1, 8, 1, 1], [4, 16, 2, 2]]
    return of_classes(models.MobileNetV2, width_mult=0.25, inverted_residual_setting=stages, **options)


def mobile_v3(**options: object) -> nn.Module:
    stages = [
        v3.InvertedResidualConfig(16, 3, 16, 16, True, "RE", 2, 1, 1.0),
        v3.InvertedResidualConfig(16, 3, 32, 24, False, "HS", 2, 1, 1.0),
    ]
    return of_classes(models.MobileNetV3, stages, 32, **options)


def efficient(**options: object) -> nn.Module:
    stages = [efficientnet.MBConvConfig(1, 3, 1, 8, 8, 1), efficientnet.MBConvConfig(4, 3, 2, 8, 16, 1)]
    return of_classes(models.EfficientNet, stages, 0.2, **options)


def efficient_v2(**options: object) -> nn.Module:
    stages = [efficientnet.FusedMBConvConfig(1, 3, 1, 8, 8, 1), efficientnet.MBConvConfig(4, 3, 2, 8, 16, 1)]
    return of_classes(models.EfficientNet, stages, 0.2, last_channel=32, **options)


def regular(**options: object) -> nn.Module:
    params = regnet.BlockParams.from_init_params(depth=4, w_0=8, w_a=8.0, w_m=2.5, group_width=8, se_ratio=0.25)
    return of_classes(models.RegNet, params, stem_width=8, **options)


def dense() -> nn.Module:
    return of_classes(models.DenseNet, 4, (1, 1, 1, 1), 8, 2)


def shuffled() -> nn.Module:
    return of_classes(models.ShuffleNetV2, [1, 1, 1], [8, 16, 32, 64, 64])


def convolutions(**options: bool) -> nn.Module:
    """The convolutions of a VGG with a head of one's own."""
    layers = vgg.make_layers([8, "M", 16, "M", 16, "M"], **options)
    return nn.Sequential(layers, nn.Flatten(), nn.Linear(256, 4))


def inception_block() -> nn.Module:
    block = Inception(3, 4, 4, 8, 2, 4, 4)
    return nn.Sequential(block, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(320, 4))


def maximal(**options: object) -> nn.Module:
    return of_classes(models.MaxVit, (32, 32), 8, 4, [8], [1], 4, 0.1, **options)


def windows(block: Callable[..., nn.Module]) -> nn.Module:
    return of_classes(models.SwinTransformer, [4, 4], 8, [2, 2], [1, 2], [4, 4], block=block)


def convnext() -> nn.Module:
    return of_classes(models.ConvNeXt, [CNBlockConfig(8, 16, 1), CNBlockConfig(16, None, 1)], 0.1)


TORCHVISION: Mapping[str, Brought] = {
    "ResNet": Brought(resnet, "pictures", "refused", NO_BATCH, "ResNet, group norm"),
    "ResNet, group norm": Brought(lambda: resnet(**GROUPS), "pictures"),
    "ResNet, last layer alone": Brought(fine_tuned, "pictures"),
    "ResNeXt, group norm": Brought(lambda: narrow(groups=2, width_per_group=8, **GROUPS), "pictures"),
    "wide ResNet, group norm": Brought(lambda: narrow(width_per_group=128, **GROUPS), "pictures"),
    "MobileNetV2": Brought(mobile, "pictures", "refused", NO_BATCH, "MobileNetV2, group norm"),
    "MobileNetV2, group norm": Brought(lambda: mobile(**GROUPS), "pictures"),
    "MobileNetV3": Brought(mobile_v3, "pictures", "refused", NO_BATCH, "MobileNetV3, group norm"),
    "MobileNetV3, group norm": Brought(lambda: mobile_v3(**GROUPS), "pictures"),
    "EfficientNet": Brought(efficient, "pictures", "refused", NO_BATCH, "EfficientNet, group norm"),
    "EfficientNet, group norm": Brought(lambda: efficient(**GROUPS), "pictures"),
    "EfficientNetV2, group norm": Brought(lambda: efficient_v2(**GROUPS), "pictures"),
    "RegNet": Brought(regular, "pictures", "refused", NO_BATCH, "RegNet, group norm"),
    "RegNet, group norm": Brought(lambda: regular(**GROUPS), "pictures"),
    "DenseNet": Brought(dense, "pictures", "refused", NO_BATCH, "DenseNet, group norm"),
    "DenseNet, group norm": Brought(lambda: in_groups(dense()), "pictures"),
    "ShuffleNetV2": Brought(shuffled, "pictures", "refused", NO_BATCH, "ShuffleNetV2, group norm"),
    "ShuffleNetV2, group norm": Brought(lambda: in_groups(shuffled()), "pictures"),
    "MNASNet, group norm": Brought(lambda: in_groups(of_classes(models.MNASNet, 0.1)), "pictures"),
    "VGG": Brought(convolutions, "pictures"),
    "VGG, batch norm": Brought(lambda: convolutions(batch_norm=True), "pictures", "refused", NO_BATCH, "VGG"),
    "SqueezeNet": Brought(lambda: of_classes(models.SqueezeNet, "1_1"), "pictures"),
    "GoogLeNet with auxiliary heads": Brought(
        lambda: of_classes(models.GoogLeNet, init_weights=False),
        "pictures",
        "refused",
        "tuple|GoogLeNetOutputs|GroupNorm",
    ),
    "Inception block, group norm": Brought(lambda: in_groups(inception_block()), "pictures"),
    "ConvNeXt": Brought(convnext, "pictures"),
    "vision transformer": Brought(lambda: of_classes(models.VisionTransformer, 32, 8, 1, 2, 16, 32), "pictures"),
    "Swin": Brought(lambda: windows(SwinTransformerBlock), "pictures", "generic path"),
    "Swin V2": Brought(lambda: windows(SwinTransformerBlockV2), "pictures", "generic path"),
    "MaxViT": Brought(maximal, "pictures", "refused", NO_BATCH, "MaxViT, group norm"),
    "MaxViT, group norm": Brought(lambda: maximal(**GROUPS), "pictures"),
    "ResNet of clips": Brought(
        lambda: moving(clips.Conv3DSimple), "clips", "refused", NO_BATCH, "ResNet of clips, group norm"
    ),
    "ResNet of clips, group norm": Brought(lambda: in_groups(moving(clips.Conv3DSimple)), "clips"),
}
